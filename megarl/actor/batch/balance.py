"""Balances sequences over ranks so that every rank does about the same work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from megarl.families import decoder


@dataclass(frozen=True)
class SequenceCost:
    """FLOPs of one forward pass over a sequence: `linear * tokens + quadratic * tokens^2`.

    Backward costs a fixed multiple of it. A matrix product with `[m, n]` weights counts 2 * m * n per token (Kaplan et
    al. 2020, table 1). Causal attention counts half of all pairs of tokens.
    """

    linear: float
    quadratic: float

    @staticmethod
    def of(config: PretrainedConfig) -> SequenceCost:
        """Computes the cost from the model's config.

        Linear: projections, MLPs (of active experts only) and the LM head. Quadratic: attention scores and their
        weighted sums of values.
        """
        model = decoder(config)
        blocks = [block for layer in model.layers for block in (layer.attention, layer.mlp)]
        elements = sum(block.active_elements(model.hidden) for block in blocks) + model.hidden * model.vocab
        return SequenceCost(2.0 * elements, 2.0 * sum(layer.attention.score_size for layer in model.layers))

    def __call__(self, tokens: int) -> float:
        return self.linear * tokens + self.quadratic * tokens * tokens


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Splits the indices of `costs` into `parts` groups of nearly equal sums.

    Uses the largest differencing method (Karmarkar and Karp 1982). It merges the two solutions with the widest spread
    until one remains, pairing heavy parts of one with light parts of the other. Sums differ by at most the largest
    cost.
    """
    # Heap entry: (-spread, index as tie-break, solution). A solution lists its non-empty parts as (sum, members),
    # lightest first. `members` is an index or a pair of members, so that most merges cost few operations.
    heap: list[tuple[float, int, list[tuple[float, Any]]]]
    heap = [(-cost if parts > 1 else 0.0, index, [(cost, index)]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, wide = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        other.reverse()
        empty = parts - len(wide)  # empty parts of `wide`, which take the heaviest parts of `other`
        rest = other[empty:]
        joined = (
            other[:empty] + [(a + b, (m, n)) for (a, m), (b, n) in zip(wide, rest, strict=False)] + wide[len(rest) :]
        )
        joined.sort(key=lambda part: part[0])
        lightest = joined[0][0] if len(joined) == parts else 0.0
        heapq.heappush(heap, (lightest - joined[-1][0], order, joined))
    groups = [_listed(members) for _, members in reversed(heap[0][2])] if heap else []
    return groups + [[] for _ in range(parts - len(groups))]


def _listed(members: Any) -> list[int]:
    """Lists the indices in nested pairs, in ascending order."""
    indices, left = [], [members]
    while left:
        item = left.pop()
        if isinstance(item, tuple):
            left += item
        else:
            indices.append(item)
    return sorted(indices)


def imbalance(loads: Sequence[float]) -> float:
    """Excess of the largest load over the mean: 0.05 is 5%."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0
