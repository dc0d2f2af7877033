r"""Prompts for competition mathematics: the answer goes into `\boxed{}`, which the reward `math` judges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

INSTRUCTION = "\nReason step by step, and put your final answer within \\boxed{}."


def to_prompt(cfg: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes rows of `messages` and `answer` from a problem and an answer: `type: megarl.data.boxed.to_prompt`.

    Options: `field_problem` (default `problem`) and `field_answer` (default `answer`) name the columns.
    """
    options = cfg["datasets"][0]["options"]
    problem, answer = options.get("field_problem", "problem"), options.get("field_answer", "answer")

    def transform(example: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": str(example[problem]).strip() + INSTRUCTION}]
        # empties all other columns: a `prompt` among them would be taken for the messages
        return {**dict.fromkeys(example), "messages": messages, "answer": str(example[answer]).strip()}

    return transform
