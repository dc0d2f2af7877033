"""Extracts the answer of a completion for majority votes: a box, a GSM8K number or the last line."""

from __future__ import annotations

from megarl.rewards.gsm8k import extract_solution
from megarl.rewards.math import extract_boxed


def answer_of(completion: str) -> str:
    """Returns the content of the last box, else the last number after `####`, else the last non-empty line."""
    boxed = extract_boxed(completion)
    if boxed is not None:
        return boxed.strip()
    number = extract_solution(completion)
    if number is not None:
        return number
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else ""
