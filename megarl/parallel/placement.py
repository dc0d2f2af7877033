"""Place of each rank in a layout, computed from the sizes alone, without Megatron or process groups.

Ranks are numbered in Megatron's default order "tp-cp-ep-dp-pp" (parallel_state.py:617): tensor parallel neighbours
first, pipeline stages last. Experts have their own layout over the ranks of a pipeline stage: etp, then ep, then
replicas.
"""

from __future__ import annotations

from typing import NamedTuple

from megarl.parallel.config import ParallelConfig


class Place(NamedTuple):
    """A rank's index along every dimension.

    Ranks that differ only in `cp` and `dp` have the same dense weights. Ranks that differ only in `edp` have the same
    experts.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


def place_of(parallel: ParallelConfig, rank: int) -> Place:
    """Computes the place of world rank `rank`, counted from 0."""
    tp, cp, pp = parallel.tp_size, parallel.cp_size, parallel.pp_size
    per_stage = parallel.world_size() // pp
    if not 0 <= rank < per_stage * pp:
        raise ValueError(f"rank {rank} is not in a world of {per_stage * pp}")
    stage, rank_in_stage = divmod(rank, per_stage)
    etp, ep = parallel.expert_tp_size, parallel.ep_size
    return Place(
        tp=rank_in_stage % tp,
        cp=rank_in_stage // tp % cp,
        dp=rank_in_stage // (tp * cp),
        pp=stage,
        etp=rank_in_stage % etp,
        ep=rank_in_stage // etp % ep,
        edp=rank_in_stage // (etp * ep),
    )


def places(parallel: ParallelConfig) -> list[Place]:
    """Computes the places of all ranks of the world, in order."""
    return [place_of(parallel, rank) for rank in range(parallel.world_size())]
