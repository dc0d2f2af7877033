"""Shared by the tests of workflows: a problem, its reward, and a batch's sequences as text."""

from __future__ import annotations

from typing import Any

from megarl.types import GenerationHyperparameters

GCONFIG = GenerationHyperparameters(n_samples=1, max_new_tokens=64)
DATA = {"messages": [{"role": "user", "content": "Leo has 7 pens."}], "answer": "7"}


def reward_of_seven(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    return float(completions.strip() == data["answer"])


def sequences(batch: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Text of every sequence, whole and trained on."""
    parts = zip(
        batch["input_ids"].split(batch.lengths.tolist()), batch["loss_mask"].split(batch.lengths.tolist()), strict=True
    )
    return [(tokenizer.decode(ids), tokenizer.decode(ids[mask])) for ids, mask in parts]
