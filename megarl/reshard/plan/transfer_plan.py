"""What is sent: a plan of copies, made by `planner.plan`, and what each rank has to do by it.

Servers are alike and trainer ranks repeat each other, so the copies are kept per *kind* of destination (`Ops`,
`Buckets`) and only the choice of the sender is kept per rank (`Messages`); `Plan.sends` and `Plan.receives` give what
one rank has to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.reshard.plan.box_arrays import sum_by
from megarl.reshard.plan.holdings import Holdings, Ints, Topology


@dataclass(frozen=True, eq=False)
class Ops:
    """Copies of a box each, grouped by bucket: from a block of the sources into a row of the destinations.

    `block [n]`: the source box, as numbered by `Plan.block_of_row`; `row [n]`: row of the destinations; `start`,
    `stop [n, dims]`: the box, in the checkpoint's coordinates; `offset [n]`: bytes into the bucket.
    """

    block: Ints
    row: Ints
    start: Ints
    stop: Ints
    offset: Ints


@dataclass(frozen=True, eq=False)
class Buckets:
    """Ops that travel together: `first [b + 1]` into `Ops`, `nbytes [b]`; `holder [b]` is the set of destinations that
    want it, `replicas [b]` the set of sources that have all of it (`Plan.replica_sets`)."""

    first: Ints
    nbytes: Ints
    holder: Ints
    replicas: Ints


@dataclass(frozen=True, eq=False)
class Messages:
    """Who sends which bucket to whom, in the global order: `bucket`, `source`, `destination [m]`.

    Every rank works through its own messages by rising index. As all agree on the order, no two wait for each other.
    """

    bucket: Ints
    source: Ints
    destination: Ints


@dataclass(frozen=True, eq=False)
class Transfer:
    """One message as one of its ends sees it.

    `index`: in the global order; `peer`: rank at the other end; `nbytes`: of the message. Op `i` is the part
    `[start[i], stop[i])` (relative to the fragment's own box) of fragment `fragment[i]`, an index into this rank's
    list of fragments, and lies at byte `offset[i]`, in row-major order and in the destination's dtype `dtype[i]`: the
    sender casts. Offsets are multiples of the item size and leave no gaps. In `start` and `stop` a dimension that a
    tensor lacks is `[0, 1)`.
    """

    index: int
    peer: int
    nbytes: int
    fragment: Ints
    start: Ints
    stop: Ints
    offset: Ints
    dtype: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.fragment)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """The whole transfer. `hash` (hex) is equal on all ranks that planned from equal inputs."""

    sources: Holdings
    destinations: Holdings
    topology: Topology
    bucket_bytes: int
    block_of_row: Ints  # [source rows]: rows that hold the same box are one block
    replica_sets: tuple[tuple[int, ...], ...]  # sets of source ranks
    ops: Ops
    buckets: Buckets
    messages: Messages
    waived: tuple[str, ...]  # source tensors that no destination holds
    hash: str

    def sends(self, rank: int) -> Iterator[Transfer]:
        """What source rank `rank` sends, in order."""
        return self._transfers(rank, sending=True)

    def receives(self, rank: int) -> Iterator[Transfer]:
        """What destination rank `rank` receives, in order."""
        return self._transfers(rank, sending=False)

    def _transfers(self, rank: int, *, sending: bool) -> Iterator[Transfer]:
        side = self.sources if sending else self.destinations
        own, peers = (
            (self.messages.source, self.messages.destination)
            if sending
            else (self.messages.destination, self.messages.source)
        )
        rows = side.rows_of(rank)
        keys = self.block_of_row[rows] if sending else rows
        by_key = np.argsort(keys, kind="stable")
        wanted = self.ops.block if sending else self.ops.row
        for index in np.flatnonzero(own == rank):
            bucket = self.messages.bucket[index]
            ops = slice(self.buckets.first[bucket], self.buckets.first[bucket + 1])
            fragment = by_key[np.searchsorted(keys, wanted[ops], sorter=by_key)]
            origin = side.start[rows[fragment]]
            dtypes = self.destinations.dtype[self.ops.row[ops]]
            yield Transfer(
                index=int(index),
                peer=int(peers[index]),
                nbytes=int(self.buckets.nbytes[bucket]),
                fragment=fragment,
                start=self.ops.start[ops] - origin,
                stop=self.ops.stop[ops] - origin,
                offset=self.ops.offset[ops],
                dtype=tuple(self.destinations.dtypes[code] for code in dtypes),
            )

    @cached_property
    def bytes_out(self) -> Ints:
        """Bytes that each source rank sends, `[source ranks]`."""
        sizes = self.buckets.nbytes[self.messages.bucket]
        return sum_by(self.messages.source, sizes, len(self.topology.source_node))

    @cached_property
    def bytes_in(self) -> Ints:
        """Bytes that each destination rank receives, `[destination ranks]`."""
        sizes = self.buckets.nbytes[self.messages.bucket]
        return sum_by(self.messages.destination, sizes, len(self.topology.node))

    @cached_property
    def bytes_needed(self) -> Ints:
        """Bytes of what each destination rank holds: no plan can send it less."""
        per_holder = sum_by(self.destinations.holder, self.destinations.nbytes, len(self.destinations.holders))
        total = np.zeros(len(self.topology.node), dtype=np.int64)
        for holder, ranks in enumerate(self.destinations.holders):
            total[list(ranks)] += per_holder[holder]
        return total
