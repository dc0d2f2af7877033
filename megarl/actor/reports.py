"""Metrics of a batch, from the reports of its microbatches on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.parallel.broadcast import gather_json
from megarl.parallel.groups import Groups

WeightedReport = tuple[float, Mapping[str, Tensor | float]]  # a microbatch's weight, and its metrics before reading


def reduced(reports: list[WeightedReport], groups: Groups) -> dict[str, float]:
    """Computes weighted sums (maxima for `*_max`) over all microbatches of all ranks, equal on every rank.

    Weights sum to 1, so sums are means. Only tp rank 0 and cp rank 0 of the last stage contribute; the other ranks of
    their groups have the same values. Sums run in rank order, so the result does not depend on the order of arrival.
    """
    local_sums: dict[str, float] = {}
    values = iter(_as_floats([value for _, report in reports for value in report.values()]))
    for weight, report in reports:
        named = {key: next(values) for key in report}
        _add(local_sums, {k: v if k.endswith("_max") else weight * v for k, v in named.items()})
    if groups.world_size == 1:
        return local_sums
    contributes = groups.is_last_stage and groups.tp_rank == 0 and groups.cp_rank == 0
    result: dict[str, float] = {}
    for rank_sums in gather_json(local_sums if contributes else {}):
        _add(result, rank_sums)
    return result


def _as_floats(values: list[Tensor | float]) -> list[float]:
    """Reads scalars, those on a GPU all at once: each reading waits for it."""
    waiting = [value.double().reshape(()) for value in values if isinstance(value, Tensor) and value.is_cuda]
    read = iter(torch.stack(waiting).tolist() if waiting else [])
    return [next(read) if isinstance(value, Tensor) and value.is_cuda else float(value) for value in values]


def _add(total: dict[str, float], part: dict[str, float]) -> None:
    """Adds a part's metrics to the total, in place. Metrics named `*_max` take the maximum."""
    for key, value in part.items():
        total[key] = max(total.get(key, -math.inf), value) if key.endswith("_max") else total.get(key, 0.0) + value
