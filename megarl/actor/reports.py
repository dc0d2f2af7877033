"""Metrics of a batch, from the reports of its microbatches on all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megarl.parallel.broadcast import gather_json
from megarl.parallel.groups import Groups
from megarl.types import Metrics, TokenMean

WeightedReport = tuple[float, Metrics]  # a microbatch's weight, and its metrics before reading


def reduced(reports: list[WeightedReport], groups: Groups) -> dict[str, float]:
    """Computes means (maxima for `*_max`) over all microbatches of all ranks, equal on every rank.

    A metric counts with its microbatch's weight, and these sum to 1; a `TokenMean` counts with its tokens. Only tp rank
    0 and cp rank 0 of the last stage contribute; the other ranks of their groups have the same values. Sums run in rank
    order, so the result does not depend on the order of arrival.
    """
    sums: dict[str, float] = {}
    tokens: dict[str, float] = {}  # of each TokenMean
    read = iter(_as_floats([part for _, report in reports for metric in report.values() for part in _parts(metric)]))
    for weight, report in reports:
        for name, metric in report.items():
            value = next(read)
            counts = {name: next(read)} if isinstance(metric, TokenMean) else {}
            _add(tokens, counts)
            _add(sums, {name: value if name.endswith("_max") else counts.get(name, weight) * value})
    if groups.world_size > 1:
        contributes = groups.is_last_stage and groups.tp_rank == 0 and groups.cp_rank == 0
        of_ranks = gather_json([sums, tokens] if contributes else [{}, {}])
        sums, tokens = {}, {}
        for rank_sums, rank_tokens in of_ranks:
            _add(sums, rank_sums)
            _add(tokens, rank_tokens)
    return {name: value / max(tokens.get(name, 1.0), 1.0) for name, value in sums.items()}


def detached(metrics: Metrics) -> Metrics:
    """Metrics that keep no graph of their microbatch."""

    def alone(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    return {
        name: TokenMean(*map(alone, metric)) if isinstance(metric, TokenMean) else alone(metric)
        for name, metric in metrics.items()
    }


def _parts(metric: Tensor | float | TokenMean) -> tuple[Tensor | float, ...]:
    return tuple(metric) if isinstance(metric, TokenMean) else (metric,)


def _as_floats(values: list[Tensor | float]) -> list[float]:
    """Reads scalars, those on a GPU all at once: each reading waits for it."""
    waiting = [value.double().reshape(()) for value in values if isinstance(value, Tensor) and value.is_cuda]
    read = iter(torch.stack(waiting).tolist() if waiting else [])
    return [next(read) if isinstance(value, Tensor) and value.is_cuda else float(value) for value in values]


def _add(total: dict[str, float], part: dict[str, float]) -> None:
    """Adds a part's metrics to the total, in place. Metrics named `*_max` take the maximum."""
    for key, value in part.items():
        total[key] = max(total.get(key, -math.inf), value) if key.endswith("_max") else total.get(key, 0.0) + value
