"""Shared by the tests of workflows: a problem, its reward, and what a batch must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(frozen=True)
class Exchange:
    """One request to the servers and the answer to it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


def assert_trained_once(batch: Any, exchanges: Sequence[Exchange]) -> None:
    """Each answer stands once in the batch: after the tokens of its request, with its log-probs and versions."""
    keys = ("input_ids", "loss_mask", "rollout_logprobs", "versions")
    rows = list(zip(*(batch[key].split(batch.lengths.tolist()) for key in keys), strict=True))
    places: set[tuple[int, int]] = set()
    for exchange in exchanges:
        begin, end = len(exchange.prompt), len(exchange.prompt) + len(exchange.tokens)
        matching = [
            (index, begin)
            for index, (ids, mask, logprobs, versions) in enumerate(rows)
            if ids[:end].tolist() == exchange.prompt + exchange.tokens
            and bool(mask[begin:end].all())
            and torch.equal(logprobs[begin:end], torch.tensor(exchange.logprobs))
            and versions[begin:end].tolist() == exchange.versions
            and (index, begin) not in places
        ]
        assert matching, exchange
        places.add(matching[0])
    assert int(batch["loss_mask"].sum()) == sum(len(exchange.tokens) for exchange in exchanges)
    assert not batch["rollout_logprobs"][~batch["loss_mask"]].any()
    assert (batch["versions"][~batch["loss_mask"]] == -1).all()
