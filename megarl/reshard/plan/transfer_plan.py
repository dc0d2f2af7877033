"""A plan of copies, made by `planner.plan`, and each rank's part of it.

Servers are alike and trainer ranks repeat each other. Copies are therefore kept per *kind* of destination (`Ops`,
`Buckets`); only the choice of the sender is kept per rank (`Messages`). `TransferPlan.sends`, `receives` and
`forwards` list one rank's messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.reshard.plan.box_arrays import sum_by
from megarl.reshard.plan.holdings import Holdings, Ints, Topology

NO_RELAY = -1


@dataclass(frozen=True, eq=False)
class Ops:
    """Copies of one box each, grouped by bucket, from a block of the sources into a row of the destinations.

    `block [n]`: the source box, as numbered by `TransferPlan.block_of_row`; `row [n]`: row of the destinations;
    `start`, `stop [n, dims]`: the box, in the checkpoint's coordinates; `offset [n]`: bytes into the bucket.
    """

    block: Ints
    row: Ints
    start: Ints
    stop: Ints
    offset: Ints


@dataclass(frozen=True, eq=False)
class Buckets:
    """Ops that travel together.

    `first [b + 1]`: start of each bucket in `Ops`; `nbytes [b]`; `holder [b]`: the set of destinations that need it;
    `replicas [b]`: the set of sources that have all of it, an index into `TransferPlan.replica_sets`.
    """

    first: Ints
    nbytes: Ints
    holder: Ints
    replicas: Ints


@dataclass(frozen=True, eq=False)
class Messages:
    """One bucket to one destination each, in the global order: `bucket`, `source`, `destination`, `relay [m]`.

    `source` is the trainer rank whose copy it is. It sends the bucket itself where `relay` is NO_RELAY. Elsewhere the
    destination rank `relay`, which received the bucket by an earlier message, sends it on.

    Every rank works through its own sends and its own receives by rising index. As all agree on the order, no two wait
    for each other.
    """

    bucket: Ints
    source: Ints
    destination: Ints
    relay: Ints


@dataclass(frozen=True, eq=False)
class RankMessage:
    """One message as seen from one of its ends.

    `index`: place in the global order; `peer`: rank at the other end; `nbytes`: size of the message; `relayed`: True if
    a destination rank sends it on, and `peer` of a receiver is that rank.

    Op `i` copies the part `[start[i], stop[i])` of fragment `fragment[i]`. The fragment is an index into this rank's
    list, and the part is relative to the fragment's own box. Dimensions that a tensor lacks are `[0, 1)`.

    The part lies at byte `offset[i]` of the message, row-major, in the destination's dtype `dtype[i]`: the sender
    casts. Offsets are multiples of the item size and leave no gaps.
    """

    index: int
    peer: int
    nbytes: int
    fragment: Ints
    start: Ints
    stop: Ints
    offset: Ints
    dtype: tuple[str, ...]
    relayed: bool = False

    def __len__(self) -> int:
        return len(self.fragment)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """All messages between all ranks. `hash` (hex) is equal on all ranks that planned from equal inputs.

    Waived: a trainer tensor that no server needs, named explicitly. Any other unused tensor is an error.
    """

    sources: Holdings
    destinations: Holdings
    topology: Topology
    bucket_bytes: int
    block_of_row: Ints  # [source rows]: rows with equal boxes are one block
    replica_sets: tuple[tuple[int, ...], ...]  # sets of source ranks
    ops: Ops
    buckets: Buckets
    messages: Messages
    waived: tuple[str, ...]
    hash: str

    @property
    def is_relayed(self) -> bool:
        """True if servers send messages on to others."""
        return bool((self.messages.relay != NO_RELAY).any())

    def sends(self, rank: int) -> Iterator[RankMessage]:
        """Messages from source rank `rank`, in order."""
        messages = self.messages
        own = np.flatnonzero((messages.source == rank) & (messages.relay == NO_RELAY))
        return self._messages_of(rank, own, messages.destination, at_source=True)

    def receives(self, rank: int) -> Iterator[RankMessage]:
        """Messages to destination rank `rank`, in order."""
        messages = self.messages
        peers = np.where(messages.relay == NO_RELAY, messages.source, messages.relay)
        return self._messages_of(rank, np.flatnonzero(messages.destination == rank), peers, at_source=False)

    def forwards(self, rank: int) -> Iterator[RankMessage]:
        """Messages that destination rank `rank` sends on, in order. It received each bucket by an earlier message."""
        own = np.flatnonzero(self.messages.relay == rank)
        return self._messages_of(rank, own, self.messages.destination, at_source=False)

    def _messages_of(self, rank: int, indices: Ints, peers: Ints, *, at_source: bool) -> Iterator[RankMessage]:
        """The messages `indices` as copies between a bucket and the fragments of a source or destination rank."""
        side = self.sources if at_source else self.destinations
        rows = side.rows_of(rank)
        keys = self.block_of_row[rows] if at_source else rows
        by_key = np.argsort(keys, kind="stable")
        key_of_op = self.ops.block if at_source else self.ops.row
        for index in indices:
            bucket = self.messages.bucket[index]
            ops = slice(self.buckets.first[bucket], self.buckets.first[bucket + 1])
            fragment = by_key[np.searchsorted(keys, key_of_op[ops], sorter=by_key)]
            origin = side.start[rows[fragment]]
            dtypes = self.destinations.dtype[self.ops.row[ops]]
            yield RankMessage(
                index=int(index),
                peer=int(peers[index]),
                nbytes=int(self.buckets.nbytes[bucket]),
                fragment=fragment,
                start=self.ops.start[ops] - origin,
                stop=self.ops.stop[ops] - origin,
                offset=self.ops.offset[ops],
                dtype=tuple(self.destinations.dtypes[code] for code in dtypes),
                relayed=bool(self.messages.relay[index] != NO_RELAY),
            )

    def sources_of(self, rank: int) -> list[int]:
        """Trainer ranks whose copies destination rank `rank` receives, from them or through relays."""
        return sorted(set(self.messages.source[self.messages.destination == rank].tolist()))

    @cached_property
    def bytes_out(self) -> Ints:
        """Bytes sent by each source rank, `[source ranks]`."""
        direct = self.messages.relay == NO_RELAY
        sizes = self.buckets.nbytes[self.messages.bucket[direct]]
        return sum_by(self.messages.source[direct], sizes, len(self.topology.source_node))

    @cached_property
    def bytes_packed(self) -> Ints:
        """Bytes of the different buckets that each source rank sends, `[source ranks]`."""
        direct, buckets = self.messages.relay == NO_RELAY, len(self.buckets.nbytes)
        packed = np.unique(self.messages.source[direct] * buckets + self.messages.bucket[direct])
        return sum_by(packed // buckets, self.buckets.nbytes[packed % buckets], len(self.topology.source_node))

    @cached_property
    def bytes_forwarded(self) -> Ints:
        """Bytes sent on by each destination rank, `[destination ranks]`."""
        relayed = self.messages.relay != NO_RELAY
        sizes = self.buckets.nbytes[self.messages.bucket[relayed]]
        return sum_by(self.messages.relay[relayed], sizes, len(self.topology.node))

    @cached_property
    def bytes_in(self) -> Ints:
        """Bytes received by each destination rank, `[destination ranks]`."""
        sizes = self.buckets.nbytes[self.messages.bucket]
        return sum_by(self.messages.destination, sizes, len(self.topology.node))

    @cached_property
    def bytes_needed(self) -> Ints:
        """Bytes held by each destination rank, `[destination ranks]`: the lower bound of any plan."""
        return bytes_held(self.destinations, len(self.topology.node))


def bytes_held(side: Holdings, ranks: int) -> Ints:
    """Bytes held by each of `ranks` ranks of a side, `[ranks]`."""
    per_holder = sum_by(side.holder, side.nbytes, len(side.holders))
    total = np.zeros(ranks, dtype=np.int64)
    for holder, holding in enumerate(side.holders):
        total[list(holding)] += per_holder[holder]
    return total
