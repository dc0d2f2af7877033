"""Rewards on the text alone: an exact answer, a format, a length."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_THINK_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?think>).)++</think>\s*<answer>(?:(?!</?answer>).)++</answer>\s*", re.DOTALL
)


def exact_match_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **data: Any
) -> float:
    """1.0 where the completion is `answer`, spaces at its ends aside, else 0.0."""
    return float(completions.strip() == answer.strip())


def think_format_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """1.0 where the completion is `<think>...</think><answer>...</answer>`, each tag once, and no more, else 0.0."""
    return float(_THINK_ANSWER.fullmatch(completions) is not None)


def pattern_reward_fn(pattern: str) -> Callable[..., float]:
    """A reward function: 1.0 where the regular expression `pattern` (`.` matches newlines) matches the whole text."""
    compiled = re.compile(pattern, re.DOTALL)

    def reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
        return float(compiled.fullmatch(completions) is not None)

    return reward


def length_reward_fn(target: int, tolerance: int) -> Callable[..., float]:
    """A reward function: 1.0 for `target` tokens, falling to 0.0 at a distance of `tolerance` tokens."""

    def reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
        return max(0.0, 1.0 - abs(len(completion_ids) - target) / tolerance)

    return reward
