"""Which part of the model each rank of a layout holds, worked out from the sizes alone: no Megatron, no process group.

Ranks are numbered as Megatron numbers them by default (its order "tp-cp-ep-dp-pp", parallel_state.py:562): tensor
parallel neighbours first, pipeline stages last. Experts are laid out over the ranks of a pipeline stage anew, by etp,
then ep, then their replicas.
"""

from __future__ import annotations

from typing import NamedTuple

from megarl.parallel.config import ParallelConfig


class Place(NamedTuple):
    """A rank's index along every dimension. Ranks that differ in `cp` and `dp` alone hold the same dense weights;
    those that differ in `edp` alone hold the same experts."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


def place_of(parallel: ParallelConfig, rank: int) -> Place:
    """The place of world rank `rank`, counted from 0."""
    tp, cp, pp = parallel.tp_size, parallel.cp_size, parallel.pp_size
    per_stage = parallel.world_size() // pp
    if not 0 <= rank < per_stage * pp:
        raise ValueError(f"rank {rank} is not in a world of {per_stage * pp}")
    stage, within = divmod(rank, per_stage)
    etp, ep = parallel.expert_tp_size, parallel.ep_size
    return Place(
        tp=within % tp,
        cp=within // tp % cp,
        dp=within // (tp * cp),
        pp=stage,
        etp=within % etp,
        ep=within // etp % ep,
        edp=within // (etp * ep),
    )


def places(parallel: ParallelConfig) -> list[Place]:
    """The places of all ranks of the world, in order."""
    return [place_of(parallel, rank) for rank in range(parallel.world_size())]
