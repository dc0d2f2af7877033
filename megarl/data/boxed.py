r"""Problems whose answer is to stand in `\boxed{}`: competition mathematics, judged by the reward `math`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

INSTRUCTION = "\nReason step by step, and put your final answer within \\boxed{}."


def to_prompt(cfg: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """For `type: megarl.data.boxed.to_prompt`: rows with a problem and an answer as `messages` and `answer`.

    Options: `field_problem` (default `problem`) and `field_answer` (default `answer`) name the columns.
    """
    options = cfg["datasets"][0]["options"]
    problem, answer = options.get("field_problem", "problem"), options.get("field_answer", "answer")

    def transform(example: dict[str, Any]) -> dict[str, Any]:
        asked = [{"role": "user", "content": str(example[problem]).strip() + INSTRUCTION}]
        # every other column is emptied, as none of them is read: `prompt` would be taken for the messages
        return {**dict.fromkeys(example), "messages": asked, "answer": str(example[answer]).strip()}

    return transform
