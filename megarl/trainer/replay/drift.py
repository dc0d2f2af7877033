"""Figures of where two computations of one batch part: by token, by position and by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.actor.layer_states import EXPERTS, HIDDEN
from megarl.trainer.replay.compared_side import LOGPROBS
from megarl.types import PackedBatch

POSITIONS = 12  # ranges of positions
WORST = 20  # tokens shown


@dataclass(frozen=True)
class TokenDrift:
    """Log-probs of one token by both sides, in nats."""

    sequence: int
    position: int
    token: int
    one: float
    other: float

    @property
    def gap(self) -> float:
        return self.other - self.one


@dataclass(frozen=True)
class PositionDrift:
    """Gaps of the tokens at positions `[first, last]`."""

    first: int
    last: int
    tokens: int
    mean: float  # of |gap|
    largest: float


@dataclass(frozen=True)
class LayerDrift:
    """Relative error |h' - h| / |h| of the tokens' hidden states after a layer; layer 0 is the embedding."""

    layer: int
    median: float
    largest: float
    token: int  # with the largest error, in the batch
    same_experts: float | None = None  # share of tokens whose router chose the same set; None without experts


@dataclass(frozen=True)
class Drift:
    """All figures of a comparison."""

    tokens: int  # compared by log-prob
    mean: float  # of |gap|, in nats
    largest: float
    equal: int  # tokens whose log-probs are the same bits
    worst: list[TokenDrift]
    positions: list[PositionDrift]
    layers: list[LayerDrift] = field(default_factory=list)

    @property
    def parting(self) -> LayerDrift | None:
        """The first layer whose hidden states differ at all."""
        return next((layer for layer in self.layers if layer.largest > 0), None)

    @property
    def steepest(self) -> LayerDrift | None:
        """The layer that multiplies the median error the most, where there is an error before it."""
        pairs = [(a, b) for a, b in zip(self.layers, self.layers[1:], strict=False) if a.median > 0]
        return max(pairs, key=lambda pair: pair[1].median / pair[0].median)[1] if pairs else None


def drift_of(batch: PackedBatch, one: Mapping[str, Tensor], other: Mapping[str, Tensor], compared: Tensor) -> Drift:
    """Compares two sides of a batch. `compared` bool `[tokens]` marks the tokens whose log-probs both sides have."""
    index = compared.nonzero().squeeze(1)
    mine, theirs = (side[LOGPROBS].double()[index] for side in (one, other))
    gaps = (theirs - mine).abs()
    starts = batch.cu_seqlens[:-1].long().repeat_interleave(batch.lengths)
    owner = torch.arange(batch.num_seqs).repeat_interleave(batch.lengths)
    position = (torch.arange(batch.total_tokens) - starts)[index]
    order = gaps.nan_to_num(math.inf).argsort(descending=True, stable=True)[:WORST].tolist()
    worst = [
        TokenDrift(
            int(owner[index[i]]), int(position[i]), int(batch["input_ids"][index[i]]), float(mine[i]), float(theirs[i])
        )
        for i in order
    ]
    layers = [_layer(key, one, other) for key in sorted(one) if key.startswith(HIDDEN) and key in other]
    return Drift(
        tokens=len(index),
        mean=float(gaps.mean()),
        largest=float(gaps.max()),
        equal=int((mine == theirs).sum()),
        worst=worst,
        positions=_by_position(position, gaps),
        layers=layers,
    )


def _by_position(position: Tensor, gaps: Tensor) -> list[PositionDrift]:
    low, high = int(position.min()), int(position.max())
    width = max(1, math.ceil((high - low + 1) / POSITIONS))
    ranges = []
    for first in range(low, high + 1, width):
        inside = gaps[(position >= first) & (position < first + width)]
        if len(inside):
            last = min(first + width - 1, high)
            ranges.append(PositionDrift(first, last, len(inside), float(inside.mean()), float(inside.max())))
    return ranges


def _layer(key: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> LayerDrift:
    mine, theirs = one[key].double(), other[key].double()
    errors = (theirs - mine).norm(dim=1) / mine.norm(dim=1).clamp(min=1e-30)
    number = key.removeprefix(HIDDEN)
    routed: Any = None
    if EXPERTS + number in one and EXPERTS + number in other:
        routed = float((one[EXPERTS + number] == other[EXPERTS + number]).all(dim=1).double().mean())
    worst = int(errors.argmax())
    return LayerDrift(int(number), float(errors.median()), float(errors[worst]), worst, routed)
