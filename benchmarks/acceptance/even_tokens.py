"""The acceptance's reward: a random model of any tokenizer can learn it within a few steps."""

from __future__ import annotations

from typing import Any


def reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: Any) -> float:
    """Share of the completion's tokens whose number is even."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))
