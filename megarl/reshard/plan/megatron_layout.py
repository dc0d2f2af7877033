"""The trainer's side of a plan, from the table of a Megatron layout."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from megarl.reshard.plan.holdings import Holdings, Ints


class LayoutTable(Protocol):
    """The result of `megarl.actor.weights.shards.world_table`: columns as in `Holdings`, every replica listed once."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def tensor(self) -> Ints: ...
    @property
    def start(self) -> Ints: ...
    @property
    def stop(self) -> Ints: ...
    @property
    def holder(self) -> Ints: ...
    @property
    def holders(self) -> tuple[tuple[int, ...], ...]: ...


def source_holdings(table: LayoutTable, dtype: str = "bfloat16") -> Holdings:
    """Holdings of all trainer ranks, from the layout alone, with every tensor in `dtype`.

    The dtype decides nothing: bytes are counted in the servers' dtypes, to which senders cast.
    """
    return Holdings(
        names=table.names,
        tensor=table.tensor,
        start=table.start,
        stop=table.stop,
        dtypes=(dtype,),
        dtype=np.zeros(len(table.tensor), dtype=np.int64),
        holder=table.holder,
        holders=table.holders,
    )
