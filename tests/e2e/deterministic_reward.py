"""A reward that differs between the texts of a random model, which no task's reward does."""

from __future__ import annotations

from typing import Any


def score(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Scores a text by the share of even token ids."""
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
