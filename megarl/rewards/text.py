"""Rewards that depend on the text only: an exact answer, a format."""

from __future__ import annotations

import re
from typing import Any

_THINK_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?think>).)++</think>\s*<answer>(?:(?!</?answer>).)++</answer>\s*", re.DOTALL
)


def exact_match_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **data: Any
) -> float:
    """Returns 1.0 if the completion equals `answer`, apart from whitespace at the ends, else 0.0."""
    return float(completions.strip() == answer.strip())


def think_format_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Returns 1.0 if the completion is exactly `<think>...</think><answer>...</answer>`, each tag once, else 0.0."""
    return float(_THINK_ANSWER.fullmatch(completions) is not None)
