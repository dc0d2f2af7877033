"""Runs one rank's part of a plan: pack and send on one side, receive and unpack on the other.

    sender    fragments --copy_ (casts)--> staging slot --transport--> staging slot --copy_--> fragments    receiver

A rank has two slots: one is packed or unpacked while the other is in flight. A bucket that several ranks need is packed
once.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.ops.digest import Parts, digests_of
from megarl.reshard.plan.holdings import Fragment, dtype_of, read
from megarl.reshard.plan.transfer_plan import RankMessage, TransferPlan
from megarl.reshard.transfer import delta
from megarl.reshard.transfer.copies import copy_all
from megarl.reshard.transfer.digests import BucketSample
from megarl.reshard.transfer.store import Deadline
from megarl.reshard.transfer.transports.base import PendingMessage, PlainStaging, Staging, Transport

Counts = dict[int, list[int]]  # bucket -> changed elements of each op, for buckets that travel as a delta
Digests = dict[int, list[str]]  # bucket, or message -> digest of each of its ops


class TransferError(RuntimeError):
    """A message did not get through. `peer` names the rank at the other end, `tensor` the first tensor inside."""

    def __init__(self, message: str, *, peer: str, tensor: str):
        super().__init__(message)
        self.peer = peer
        self.tensor = tensor


@dataclass(frozen=True)
class Route:
    """Route to a rank of the other side: `name` for errors, and its rank in the group of `transport`."""

    name: str
    transport: Transport
    rank: int


def part_of(fragment: Fragment, start: Sequence[int], stop: Sequence[int]) -> Any:
    """The strided view `[start, stop)` of a fragment; the plan pads boxes with `[0, 1)` to equally many dimensions."""
    dims = fragment.view.dim()
    return fragment.view[tuple(slice(a, b) for a, b in zip(start[:dims], stop[:dims], strict=True))]


class MessageViews:
    """The strided views that the ops of a message read or write, and their places in the message.

    A sender's may be values that are computed when they are packed.
    """

    def __init__(self, message: RankMessage, fragments: Sequence[Fragment]):
        of_op = [fragments[i] for i in message.fragment.tolist()]
        corners = zip(of_op, message.start.tolist(), message.stop.tolist(), strict=True)
        self.views = [part_of(fragment, start, stop) for fragment, start, stop in corners]
        self.names = [fragment.box.name for fragment in of_op]
        self.offsets: list[int] = message.offset.tolist()
        self.dtypes: list[torch.dtype] = [dtype_of(name) for name in message.dtype]
        self.itemsizes = [dtype.itemsize for dtype in self.dtypes]

    def parts(self, payload: Tensor) -> Iterator[Tensor]:
        """Yields each op's place in the message, with its dtype and shape."""
        for view, offset, dtype in zip(self.views, self.offsets, self.dtypes, strict=True):
            size = view.numel() * dtype.itemsize
            yield payload[offset : offset + size].view(dtype).view(view.shape)

    @functools.cached_property
    def _parts(self) -> Parts:
        shapes = [
            torch.empty(view.shape, dtype=d, device="meta") for view, d in zip(self.views, self.dtypes, strict=True)
        ]
        return Parts(self.offsets, shapes)

    def hashed(self, payload: Tensor) -> tuple[Parts, Tensor]:
        """The parts of the packed message and the hashes of their leaves, as `digests_of` takes them."""
        return self._parts, self._parts.leaves(payload)

    def pack(self, payload: Tensor) -> list[Tensor]:
        """Copies the views into the message, cast to its dtypes. Returns the parts of the message."""
        parts = list(self.parts(payload))
        pairs = list(zip(parts, self.views, strict=True))
        copy_all((part, view) for part, view in pairs if isinstance(view, Tensor))
        for part, view in pairs:
            if not isinstance(view, Tensor):  # made one at a time
                part.copy_(read(view))
        return parts

    def unpack(self, payload: Tensor) -> None:
        """Copies the message into the views."""
        copy_all(zip(self.views, self.parts(payload), strict=True))

    def listing(self) -> str:
        """Up to three tensor names, for errors."""
        names = list(dict.fromkeys(self.names))
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def _waiting_for(route: Route, views: MessageViews) -> Iterator[None]:
    """Turns errors inside into a TransferError that names the peer and the tensors."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        what = f"{views.listing()}: {route.name} left ({error})"
        if isinstance(error, TimeoutError):
            what = f"{views.listing()} waited for {route.name}: {error}"
        raise TransferError(what, peer=route.name, tensor=views.names[0]) from error


class Outbox:
    """Packed messages on their way: one slot is filled while the other is in flight.

    `packed` is the bucket in the open slot, -1 if none is open yet.
    """

    def __init__(self, staging: Staging):
        self.packed = -1
        self._slots = staging.slots
        self._slot = 0
        self._in_flight: list[list[tuple[PendingMessage, Route, MessageViews]]] = [[] for _ in self._slots]

    def open(self, bucket: int, deadline: Deadline) -> Tensor:
        """The next slot, for `bucket`, once all messages from it are through."""
        self._slot, self.packed = (self._slot + 1) % len(self._slots), bucket
        self._await(self._slot, deadline)
        return self._slots[self._slot]

    def send(self, nbytes: int, route: Route, views: MessageViews, index: int) -> None:
        """Starts to send the open slot as message `index`; nothing if it has no bytes."""
        if nbytes:
            with _waiting_for(route, views):
                pending = route.transport.send(self._slot, nbytes, route.rank, index)
            self._in_flight[self._slot].append((pending, route, views))

    def finish(self, deadline: Deadline) -> None:
        """Waits until all messages are through."""
        for slot in range(len(self._slots)):
            self._await(slot, deadline)

    def _await(self, slot: int, deadline: Deadline) -> None:
        while self._in_flight[slot]:
            pending, route, views = self._in_flight[slot].pop()
            with _waiting_for(route, views):
                pending.wait(deadline)


@dataclass
class SentReport:
    """One rank's sends: bytes sent, bytes of the same messages without delta, digests of the sampled buckets."""

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
        """With `keep` a copy of all sent buckets stays in memory, so that the next sync may be a delta."""
        self.routes = routes
        self.staging = staging
        self.keep = keep
        self.messages = list(plan.sends(rank))
        self.buckets = plan.messages.bucket[[m.index for m in self.messages]].tolist()
        self.last = {bucket: number for number, bucket in enumerate(self.buckets)}  # a bucket may be packed again
        self.views = {b: MessageViews(m, fragments) for b, m in zip(self.buckets, self.messages, strict=True)}
        self._last_sent: dict[int, Tensor] = {}

    def counts(self) -> Counts:
        """Counts changed elements per op since the last send, for the buckets that are smaller as a delta."""
        counts_of_bucket: Counts = {}
        for bucket, last_sent in self._last_sent.items():
            views = self.views[bucket]
            pairs = zip(views.pack(self.staging.slots[0][: last_sent.numel()]), views.parts(last_sent), strict=True)
            counts = [delta.changed(new, old).numel() for new, old in pairs]
            if delta.encoded_bytes(counts, views.itemsizes) < last_sent.numel():
                counts_of_bucket[bucket] = counts
        return counts_of_bucket

    def send(self, deadline: Deadline, sample: BucketSample, counts: Counts) -> SentReport:
        """Sends every message; buckets in `counts` travel as a delta.

        Raises:
            TransferError: a server's rank left, or the deadline passed.
        """
        sent = SentReport()
        outbox, nbytes = Outbox(self.staging), 0
        hashed: dict[int, tuple[Parts, Tensor]] = {}
        for number, (message, bucket) in enumerate(zip(self.messages, self.buckets, strict=True)):
            views, route = self.views[bucket], self.routes[message.peer]
            if bucket != outbox.packed:
                slot = outbox.open(bucket, deadline)
                parts = views.pack(slot)
                if sample.takes(bucket) and bucket not in hashed:
                    hashed[bucket] = views.hashed(slot)
                last = all(b == bucket for b in self.buckets[number : self.last[bucket] + 1])
                nbytes = self._encode(bucket, message.nbytes, slot, parts, counts.get(bucket), last)
            sent.dense_nbytes += message.nbytes
            sent.nbytes += nbytes
            outbox.send(nbytes, route, views, message.index)
        outbox.finish(deadline)
        sent.digests = digests_of(hashed)
        return sent

    def _encode(
        self, bucket: int, nbytes: int, slot: Tensor, parts: list[Tensor], counts: list[int] | None, last: bool
    ) -> int:
        """Makes a delta of the packed bucket if it has `counts`. Returns the bytes to send.

        The copy for later deltas is taken when the bucket is packed for the `last` time in this sync. Until then, each
        packing of it must be a delta to the same copy.
        """
        before = self._last_sent.get(bucket)
        if self.keep and last:
            self._last_sent[bucket] = slot[:nbytes].clone()
        if counts is None:
            return nbytes
        assert before is not None, "counts() has only buckets that were sent before"
        views = self.views[bucket]
        delta.encode(parts, list(views.parts(before)), slot)
        return delta.encoded_bytes(counts, views.itemsizes)


@dataclass(frozen=True)
class Relays:
    """Routes of a server rank to other servers: to the `sources` that send to it, and the `targets` that it sends to.

    `staging` is packed for the targets; it must not be the memory that the rank receives into.
    """

    sources: Mapping[int, Route]
    targets: Mapping[int, Route]
    staging: Staging


NO_RELAYS = Relays({}, {}, PlainStaging(0))


class Forwarder:
    """A server rank's sends to other servers. Made once per plan; `fragments` are this rank's, in the plan's order.

    A bucket is packed from the rank's own weights, once it has arrived. A delta is sent on as it came.
    """

    def __init__(self, plan: TransferPlan, rank: int, fragments: Sequence[Fragment], relays: Relays):
        self.relays = relays
        self.messages = list(plan.forwards(rank))
        self.buckets: list[int] = plan.messages.bucket[[m.index for m in self.messages]].tolist()
        self.last = {bucket: number for number, bucket in enumerate(self.buckets)}  # a bucket may be packed again
        self.views = {b: MessageViews(m, fragments) for b, m in zip(self.buckets, self.messages, strict=True)}


class Forwarding:
    """The sends of a `Forwarder` in one sync. `nbytes` are sent so far."""

    def __init__(self, forwarder: Forwarder):
        self.nbytes = 0
        self._forwarder = forwarder
        self._outbox = Outbox(forwarder.relays.staging)
        self._sent = 0  # messages
        self._deltas: dict[int, Tensor] = {}

    def keep(self, bucket: int, payload: Tensor) -> None:
        """Copies a delta that has arrived, if its bucket is sent on."""
        if bucket in self._forwarder.views:
            self._deltas[bucket] = payload.clone()

    def due(self, index: float) -> int | None:
        """The bucket of the next message, if the plan has that before message `index`; else None."""
        messages = self._forwarder.messages
        if self._sent == len(messages) or messages[self._sent].index > index:
            return None
        return self._forwarder.buckets[self._sent]

    def send(self, deadline: Deadline, counts: Counts) -> None:
        """Starts the next message; this rank holds its bucket.

        Raises:
            TransferError: the receiver left, or the deadline passed.
        """
        forwarder = self._forwarder
        message, bucket = forwarder.messages[self._sent], forwarder.buckets[self._sent]
        views, bucket_counts = forwarder.views[bucket], counts.get(bucket)
        nbytes = message.nbytes if bucket_counts is None else delta.encoded_bytes(bucket_counts, views.itemsizes)
        if nbytes and bucket != self._outbox.packed:
            slot = self._outbox.open(bucket, deadline)
            if bucket_counts is None:
                views.pack(slot)
            else:
                slot[:nbytes] = self._deltas[bucket]
        if self._sent == forwarder.last[bucket]:
            self._deltas.pop(bucket, None)
        self._outbox.send(nbytes, forwarder.relays.targets[message.peer], views, message.index)
        self._sent += 1
        self.nbytes += nbytes

    def finish(self, deadline: Deadline) -> None:
        """Waits until all messages are through. Raises TransferError as `send` does."""
        self._outbox.finish(deadline)


@dataclass(frozen=True)
class ReceivedReport:
    """One server rank's bytes: received, and sent on to other servers."""

    nbytes: int
    forwarded_nbytes: int


class ShardReceiver:
    """A server rank's part of a plan. Made once per plan; `fragments` are this rank's, in the plan's order."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        fragments: Sequence[Fragment],
        routes: Mapping[int, Route],
        staging: Staging,
        relays: Relays = NO_RELAYS,
    ):
        """`routes` lead to trainer ranks."""
        self.staging = staging
        self.relays = relays
        self.forwarder = Forwarder(plan, rank, fragments, relays)
        self.messages = list(plan.receives(rank))
        self.buckets: list[int] = plan.messages.bucket[[m.index for m in self.messages]].tolist()
        self.views = [MessageViews(m, fragments) for m in self.messages]
        self.routes = [(relays.sources if m.relayed else routes)[m.peer] for m in self.messages]

    def receive(self, deadline: Deadline, counts: Counts) -> ReceivedReport:
        """Receives every message into the fragments, and sends on what other servers get from this rank.

        Both follow the plan's order, so that ranks never wait for each other in a circle.

        Raises:
            TransferError: a trainer rank or another server left, or the deadline passed.
        """
        received = 0
        free = deque(range(len(self.staging.slots)))
        in_flight: deque[tuple[PendingMessage, int, int]] = deque()
        forwarding = Forwarding(self.forwarder)

        def unpack_oldest() -> None:
            pending, number, slot = in_flight.popleft()
            self._unpack(pending, number, deadline, counts, forwarding)
            free.append(slot)

        def forward_before(index: float) -> None:
            while (bucket := forwarding.due(index)) is not None:
                while any(self.buckets[number] == bucket for _, number, _ in in_flight):
                    unpack_oldest()
                forwarding.send(deadline, counts)

        for number, message in enumerate(self.messages):
            forward_before(message.index)
            if not free:
                unpack_oldest()
            bucket_counts = counts.get(self.buckets[number])
            nbytes = message.nbytes
            if bucket_counts is not None:
                nbytes = delta.encoded_bytes(bucket_counts, self.views[number].itemsizes)
            if nbytes:
                route, slot = self.routes[number], free.popleft()
                with _waiting_for(route, self.views[number]):
                    pending = route.transport.receive(slot, nbytes, route.rank, message.index)
                in_flight.append((pending, number, slot))
                received += nbytes
        forward_before(math.inf)
        while in_flight:
            unpack_oldest()
        forwarding.finish(deadline)
        return ReceivedReport(received, forwarding.nbytes)

    def _unpack(
        self, pending: PendingMessage, number: int, deadline: Deadline, counts: Counts, forwarding: Forwarding
    ) -> None:
        """Waits for message `number` and unpacks it."""
        views, bucket_counts = self.views[number], counts.get(self.buckets[number])
        with _waiting_for(self.routes[number], views):
            payload = pending.wait(deadline)
        if bucket_counts is None:
            views.unpack(payload)
        else:
            delta.apply(payload, bucket_counts, views.views)
            forwarding.keep(self.buckets[number], payload)
        with _waiting_for(self.routes[number], views):
            pending.release()

    def read_back(self, sample: BucketSample) -> Digests:
        """Digests of the sampled messages' tensors, read back from the live parameters."""
        slot, hashed = self.staging.slots[0], {}
        for message, bucket, views in zip(self.messages, self.buckets, self.views, strict=True):
            if sample.takes(bucket):
                views.pack(slot)
                hashed[message.index] = views.hashed(slot)
        return digests_of(hashed)
