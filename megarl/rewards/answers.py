"""The answer that a completion gives, for majority votes: of GSM8K, of a box, or its last line."""

from __future__ import annotations

from megarl.rewards.gsm8k import extract_solution
from megarl.rewards.math import extract_boxed


def answer_of(completion: str) -> str:
    """The content of the last box, else the last number after `####`, else the last line that is not empty."""
    boxed = extract_boxed(completion)
    if boxed is not None:
        return boxed.strip()
    number = extract_solution(completion)
    if number is not None:
        return number
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else ""
