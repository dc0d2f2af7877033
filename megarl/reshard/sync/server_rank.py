"""A server rank's place in the group with the trainer, kept between syncs. It knows fragments and no SGLang.

The trainer's HTTP request carries an `Order`, a few integers; everything else lies in the store or travels in the
group. A failure is reported through the store and logged, not raised: an exception would end the server, while a
failed sync must leave it paused.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.plan.holdings import Fragment
from megarl.reshard.sync.attempt import AttemptSpec, ServerGroup, group_store, key, read_attempt
from megarl.reshard.sync.world import local_address, make_plan, publish
from megarl.reshard.transfer.digests import Sample, digest
from megarl.reshard.transfer.full_tensor_transfer import receive_full
from megarl.reshard.transfer.shard_transfer import Counts, Route, ShardReceiver, TransferError
from megarl.reshard.transfer.store import Deadline, join_store, read, read_bulk, write
from megarl.reshard.transfer.transports import transport_named
from megarl.reshard.transfer.transports.base import PlainStaging, Staging, Transport
from megarl.reshard.transfer.transports.gloo import GlooTransport

log = logging.getLogger(__name__)

PROTOCOL = 2
ORDER = "megarl.order"
LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]  # the model's own loader of checkpoint tensors


@dataclass(frozen=True)
class Order:
    """What the integers in the trainer's request say."""

    protocol: int
    host: int  # IPv4 address of the store
    port: int
    server: int  # index of this server in the trainer's list
    session: int  # a random number: a later trainer may be given the same port
    epoch: int  # of the group; a new one is joined anew
    join: int  # whether the trainer waits for this server to join the group
    sequence: int  # of the attempt within the session
    deadline_ms: int

    @staticmethod
    def of(host: str, **values: int) -> Order:
        return Order(protocol=PROTOCOL, host=int(ipaddress.IPv4Address(host)), **values)

    def tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.int64)

    @staticmethod
    def parse(named_tensors: Iterable[tuple[str, Tensor]]) -> Order:
        values = dict(named_tensors)[ORDER].tolist()
        if values[0] != PROTOCOL:
            raise ValueError(
                f"the trainer speaks weight protocol {values[0]}, this server {PROTOCOL}: update one of them"
            )
        return Order(*values)

    @property
    def address(self) -> str:
        return str(ipaddress.IPv4Address(self.host))

    @property
    def group(self) -> tuple[int, ...]:
        """What must stay the same for the group to be used again."""
        return self.host, self.port, self.session, self.epoch


class ServerRank:
    """This rank, from the order that made it join to the next trainer or failure."""

    def __init__(self, order: Order, fragments: Sequence[Fragment], rank: int, size: int):
        self.order = order
        self.fragments = fragments
        self.rank = rank
        self.size = size
        self.store = join_store(order.address, order.port, order.deadline_ms / 1000)
        self.private = group_store(self.store, order.server, order.epoch)
        self.address = local_address(order.address, order.port)
        self.group: Transport | None = None
        self.staging: Staging = PlainStaging(0)
        self._receiver: ShardReceiver | None = None
        self._planned: tuple[str, str] = ("", "")  # name and hash of the plan
        write(self.private, f"layout/{rank}", {"size": size, **publish(self.store, fragments)})

    def receive(self, sequence: int, deadline: Deadline, load: LoadWeights) -> dict[str, Any]:
        """Receives one push. Returns the report for the trainer, JSON.

        Raises:
            TransferError: the trainer left or was late. PlanError, RuntimeError, OSError, ValueError: as they say.
        """
        job = read_attempt(self.store, sequence, deadline)
        if job is None:
            raise RuntimeError("the trainer gave this push up")
        sample = Sample(job.modulus, job.remainder)
        if job.carrier in ("full", "disk"):
            if self.group is None and job.carrier == "full":
                self.group = GlooTransport(self.private, self.address, self.rank + 1, self.size + 1, deadline.left())
            group = self.group if isinstance(self.group, GlooTransport) else None
            received = receive_full(self.private, group, sequence, deadline, load)
            held = [digest(f.view) for f in self.fragments] if sample.modulus else []
            return {"bytes": received, "held": held}
        receiver = self._prepare(sequence, job, deadline)
        counts: Counts = {}
        if job.delta:
            for source in sorted({t.peer for t in receiver.transfers}):
                counts.update(read_bulk(self.store, key(sequence, "counts", source), deadline))
        received = receiver.receive(deadline, counts)
        return {"bytes": received, "held": list(receiver.held(sample).items())}

    def _prepare(self, sequence: int, job: AttemptSpec, deadline: Deadline) -> ShardReceiver:
        """Joins the group, makes the plan, and waits until all ranks are known to have the same one."""
        places = [(n, s) for n, s, rank in job.places() if s.index == self.order.server and rank == self.rank]
        if len(places) != 1 or places[0][1] != ServerGroup(self.order.server, self.order.epoch, self.size):
            raise RuntimeError(f"rank {self.rank} of {self.size} has no place in the trainer's job")
        number = places[0][0]
        if self.group is None:
            transport = transport_named(job.carrier)
            needs = not transport.in_place
            self.staging = transport.make_staging(job.bucket_bytes) if needs else PlainStaging(job.bucket_bytes)
            size = job.senders + self.size
            self.group = transport(
                self.private, self.address, job.senders + self.rank, size, deadline.left(), self.staging
            )
        if self._receiver is None or self._planned[0] != job.plan:
            plan = make_plan(self.store, read_bulk(self.store, f"world/{job.plan}", deadline), deadline)
            routes = {rank: Route(f"trainer rank {rank}", self.group, rank) for rank in range(job.senders)}
            self._receiver = ShardReceiver(plan, number, self.fragments, routes, self.staging)
            self._planned = (job.plan, plan.hash)
        write(self.store, key(sequence, "hash", "server", number), {"hash": self._planned[1]})
        if not read(self.store, key(sequence, "go"), deadline):
            raise TransferError("trainer rank 0 called the push off", peer="trainer rank 0", tensor="")
        return self._receiver

    def report(self, sequence: int, result: dict[str, Any]) -> None:
        write(self.private, key(sequence, "result", self.rank), result)

    def leave(self) -> None:
        if self.group is not None:
            self.group.abort()
        self.staging.close()


_member: ServerRank | None = None


def receive(order: Order, fragments: Callable[[], Sequence[Fragment]], rank: int, size: int, load: LoadWeights) -> None:
    """Carries out one order. `fragments` gives this rank's live fragments, asked for once per group."""
    global _member
    deadline = Deadline(order.deadline_ms / 1000)
    try:
        if _member is not None and _member.order.group != order.group:
            _member.leave()
            _member = None
        if _member is None and not order.join:
            raise RuntimeError(
                "it is not in the trainer's group: it was restarted, or another trainer pushed to it since"
            )
        if _member is None:
            _member = ServerRank(order, fragments(), rank, size)
        result = _member.receive(order.sequence, deadline, load)
    except Exception as error:
        log.exception("push %d failed in rank %d", order.sequence, rank)
        if _member is not None:
            _member.leave()
            _member = None
        result = {"error": f"{type(error).__name__}: {error}"}
        if isinstance(error, TransferError):
            result |= {"peer": error.peer, "tensor": error.tensor}
        try:  # over a connection of its own: the one of the group may be what broke
            store = group_store(join_store(order.address, order.port, timeout_s=5), order.server, order.epoch)
            write(store, key(order.sequence, "result", rank), result)
        except RuntimeError:
            log.exception("push %d: the trainer cannot be told; its deadline will end it", order.sequence)
        return
    _member.report(order.sequence, result)
