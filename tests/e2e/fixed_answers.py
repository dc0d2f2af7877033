"""A rollout function whose texts follow from the prompt alone: runs on any servers then train on the same batches."""

from __future__ import annotations

import random
from typing import Any


def answer(model: Any, processing_class: Any, prompts: list[Any], generation_config: Any) -> list[str]:
    """Answers a prompt's copies with numbers drawn from the prompt, right and wrong ones."""
    drawn = random.Random(str(prompts[0]))
    return [" ".join(str(drawn.randrange(10)) for _ in range(drawn.randrange(2, 9))) for _ in prompts]


def length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Scores a text by its number of digits, which differ between a prompt's copies."""
    return len(completions.split()) / 8
