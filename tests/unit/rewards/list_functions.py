"""Reward functions of lists. The module imports fast, as every pool imports it."""

from __future__ import annotations

from typing import Any


def longest(completions: list[str], **_: Any) -> list[float]:
    """1 for the longest of a group: it cannot be known from one completion."""
    most = max(len(c) for c in completions)
    return [float(len(c) == most) for c in completions]


def conversational(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    assert {prompt[-1]["content"] for prompt in prompts} == {"1+1?"}
    assert {prompt[0]["role"] for prompt in prompts} == {"system"}
    return [float(content == "2") for content in contents]


def where_it_applies(completions: list[str], **_: Any) -> list[float | None]:
    return [float("2" in c) if c else None for c in completions]


def never(completions: list[str], **_: Any) -> list[None]:
    return [None for _ in completions]


def fails(completions: list[str], **_: Any) -> list[float]:
    raise KeyError("no_column")


def one_short(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * (len(completions) - 1)


def by_text(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: Any) -> float:
    if completions == "two":
        raise ValueError("no digits")
    return float(len(completions))
