"""Runs one rank's part of a plan: pack and send on one side, receive and unpack on the other.

    sender    fragments --copy_ (casts)--> staging slot --transport--> staging slot --copy_--> fragments    receiver

Two slots a rank: one is packed or unpacked while the other travels. A bucket that several ranks want is packed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.reshard.plan.holdings import Fragment
from megarl.reshard.plan.transfer_plan import Transfer, TransferPlan
from megarl.reshard.transfer import delta
from megarl.reshard.transfer.digests import Sample, digest
from megarl.reshard.transfer.store import Deadline
from megarl.reshard.transfer.transports.base import Pending, Staging, Transport

Counts = dict[int, list[int]]  # bucket -> elements of each op, for buckets that travel as a delta
Digests = dict[int, list[str]]  # bucket, or message -> digest of each of its ops


class TransferError(RuntimeError):
    """A message did not get through. `peer` is who was waited for, `tensor` the first tensor in the message."""

    def __init__(self, message: str, *, peer: str, tensor: str):
        super().__init__(message)
        self.peer = peer
        self.tensor = tensor


@dataclass(frozen=True)
class Route:
    """How to reach a rank of the other side: `name` in errors, and its rank in the group of `transport`."""

    name: str
    transport: Transport
    rank: int


def part_of(fragment: Fragment, start: Sequence[int], stop: Sequence[int]) -> Tensor:
    """The strided view `[start, stop)` of a fragment; the plan pads boxes with `[0, 1)` to equally many dimensions."""
    dims = fragment.view.dim()
    return fragment.view[tuple(slice(a, b) for a, b in zip(start[:dims], stop[:dims], strict=True))]


class Parts:
    """The strided views that the ops of a message read or write, and their places in the message."""

    def __init__(self, transfer: Transfer, fragments: Sequence[Fragment]):
        chosen = [fragments[i] for i in transfer.fragment.tolist()]
        corners = zip(chosen, transfer.start.tolist(), transfer.stop.tolist(), strict=True)
        self.views = [part_of(fragment, start, stop) for fragment, start, stop in corners]
        self.names = [fragment.box.name for fragment in chosen]
        self.offsets: list[int] = transfer.offset.tolist()
        self.dtypes: list[torch.dtype] = [getattr(torch, name) for name in transfer.dtype]
        self.itemsizes = [dtype.itemsize for dtype in self.dtypes]

    def pieces(self, payload: Tensor) -> Iterator[Tensor]:
        """The ops' places in the message, each with its dtype and shape."""
        for view, offset, dtype in zip(self.views, self.offsets, self.dtypes, strict=True):
            size = view.numel() * dtype.itemsize
            yield payload[offset : offset + size].view(dtype).view(view.shape)

    def pack(self, payload: Tensor) -> list[Tensor]:
        """Copies the views into the message, cast to its dtypes. Returns the pieces."""
        pieces = list(self.pieces(payload))
        for piece, view in zip(pieces, self.views, strict=True):
            piece.copy_(view)
        return pieces

    def unpack(self, payload: Tensor) -> None:
        for piece, view in zip(self.pieces(payload), self.views, strict=True):
            view.copy_(piece)

    def listing(self) -> str:
        names = list(dict.fromkeys(self.names))
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def _waiting_for(route: Route, parts: Parts) -> Iterator[None]:
    """Names the peer and the tensors in whatever fails inside."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        what = f"{parts.listing()}: {route.name} left ({error})"
        if isinstance(error, TimeoutError):
            what = f"{parts.listing()} waited for {route.name}: {error}"
        raise TransferError(what, peer=route.name, tensor=parts.names[0]) from error


@dataclass
class SentReport:
    """What a rank has sent: bytes on the wire, bytes of the same messages without delta, digests of sampled buckets."""

    nbytes: int = 0
    dense_nbytes: int = 0
    digests: Digests = field(default_factory=dict)


class ShardSender:
    """A trainer rank's part of a plan. Made once per plan; `fragments` are this rank's, in the plan's order."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        fragments: Sequence[Fragment],
        routes: Mapping[int, Route],
        staging: Staging,
        *,
        keep: bool,
    ):
        """`keep` holds a copy of what was sent, so that the next sync may be a delta."""
        self.routes = routes
        self.staging = staging
        self.keep = keep
        self.transfers = list(plan.sends(rank))
        self.buckets = plan.messages.bucket[[t.index for t in self.transfers]].tolist()
        self.last = {bucket: number for number, bucket in enumerate(self.buckets)}  # a bucket may be packed again
        self.parts = {b: Parts(t, fragments) for b, t in zip(self.buckets, self.transfers, strict=True)}
        self._kept: dict[int, Tensor] = {}

    def counts(self) -> Counts:
        """Elements that changed since they were last sent, of each op, for the buckets that are smaller as a delta."""
        found: Counts = {}
        for bucket, kept in self._kept.items():
            parts = self.parts[bucket]
            pairs = zip(parts.pack(self.staging.slots[0][: kept.numel()]), parts.pieces(kept), strict=True)
            counts = [delta.changed(new, old).numel() for new, old in pairs]
            if delta.encoded_bytes(counts, parts.itemsizes) < kept.numel():
                found[bucket] = counts
        return found

    def send(self, deadline: Deadline, sample: Sample, counts: Counts) -> SentReport:
        """Sends every message, those of the buckets in `counts` as a delta.

        Raises:
            TransferError: a server's rank left, or the deadline passed.
        """
        sent = SentReport()
        slots = self.staging.slots
        in_flight: list[list[tuple[Pending, Route, Parts]]] = [[] for _ in slots]
        slot, packed, nbytes = 0, -1, 0
        for number, (transfer, bucket) in enumerate(zip(self.transfers, self.buckets, strict=True)):
            parts, route = self.parts[bucket], self.routes[transfer.peer]
            if bucket != packed:
                slot, packed = (slot + 1) % len(slots), bucket
                _settle(in_flight[slot], deadline)
                pieces = parts.pack(slots[slot])
                if sample.takes(bucket) and bucket not in sent.digests:
                    sent.digests[bucket] = [digest(piece) for piece in pieces]
                last = all(b == bucket for b in self.buckets[number : self.last[bucket] + 1])
                nbytes = self._encode(bucket, transfer.nbytes, slots[slot], pieces, counts.get(bucket), last)
            sent.dense_nbytes += transfer.nbytes
            sent.nbytes += nbytes
            if nbytes:
                with _waiting_for(route, parts):
                    message = route.transport.send(slot, nbytes, route.rank, transfer.index)
                in_flight[slot].append((message, route, parts))
        for messages in in_flight:
            _settle(messages, deadline)
        return sent

    def _encode(
        self, bucket: int, nbytes: int, slot: Tensor, pieces: list[Tensor], counts: list[int] | None, last: bool
    ) -> int:
        """Makes a delta of the packed bucket where `counts` says so. Returns the bytes to send.

        What was sent is kept when the bucket is packed for the `last` time in this sync: others are deltas to the same.
        """
        before = self._kept.get(bucket)
        if self.keep and last:
            self._kept[bucket] = slot[:nbytes].clone()
        if counts is None:
            return nbytes
        assert before is not None, "counts() counts kept buckets only"
        parts = self.parts[bucket]
        delta.encode(pieces, list(parts.pieces(before)), slot)
        return delta.encoded_bytes(counts, parts.itemsizes)


def _settle(messages: list[tuple[Pending, Route, Parts]], deadline: Deadline) -> None:
    """Waits until the messages from a slot are through, so that it may be filled again."""
    while messages:
        message, route, parts = messages.pop()
        with _waiting_for(route, parts):
            message.wait(deadline)


class ShardReceiver:
    """A server rank's part of a plan. Made once per plan; `fragments` are this rank's, in the plan's order."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        fragments: Sequence[Fragment],
        routes: Mapping[int, Route],
        staging: Staging,
    ):
        self.routes = routes
        self.staging = staging
        self.transfers = list(plan.receives(rank))
        self.buckets = plan.messages.bucket[[t.index for t in self.transfers]].tolist()
        self.parts = [Parts(t, fragments) for t in self.transfers]

    def receive(self, deadline: Deadline, counts: Counts) -> int:
        """Receives every message into the fragments. Returns the bytes received.

        Raises:
            TransferError: a trainer rank left, or the deadline passed.
        """
        received = 0
        free = deque(range(len(self.staging.slots)))
        in_flight: deque[tuple[Pending, int, int]] = deque()
        for number, transfer in enumerate(self.transfers):
            if not free:
                free.append(self._take(*in_flight.popleft(), deadline, counts))
            changes = counts.get(self.buckets[number])
            nbytes = transfer.nbytes
            if changes is not None:
                nbytes = delta.encoded_bytes(changes, self.parts[number].itemsizes)
            if nbytes:
                route, slot = self.routes[transfer.peer], free.popleft()
                with _waiting_for(route, self.parts[number]):
                    message = route.transport.receive(slot, nbytes, route.rank, transfer.index)
                in_flight.append((message, number, slot))
                received += nbytes
        while in_flight:
            self._take(*in_flight.popleft(), deadline, counts)
        return received

    def _take(self, message: Pending, number: int, slot: int, deadline: Deadline, counts: Counts) -> int:
        """Waits for a message and unpacks it. Returns its slot, which is free again."""
        parts, changes = self.parts[number], counts.get(self.buckets[number])
        with _waiting_for(self.routes[self.transfers[number].peer], parts):
            payload = message.wait(deadline)
        if changes is None:
            parts.unpack(payload)
        else:
            delta.apply(payload, changes, parts.views)
        with _waiting_for(self.routes[self.transfers[number].peer], parts):
            message.release()
        return slot

    def held(self, sample: Sample) -> Digests:
        """Digests of what the sampled messages left in the fragments, read back from the live parameters."""
        found: Digests = {}
        for transfer, bucket, parts in zip(self.transfers, self.buckets, self.parts, strict=True):
            if sample.takes(bucket):
                found[transfer.index] = [digest(piece) for piece in parts.pack(self.staging.slots[0])]
        return found
