"""A server rank's place in the group with the trainer, kept between syncs. It knows fragments and no SGLang.

A failure is reported through the store and logged, not raised: an exception would end the server, while a failed sync
must leave it paused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.ops.digest import digest
from megarl.parallel import platform
from megarl.reshard.plan.holdings import Fragment, sent
from megarl.reshard.plan.planner import PlanError
from megarl.reshard.plan.transfer_plan import TransferPlan
from megarl.reshard.sync.attempt import AttemptSpec, ServerGroup, key, read_spec
from megarl.reshard.sync.relay_groups import RelayGroups
from megarl.reshard.sync.server_order import ServerOrder
from megarl.reshard.sync.world import local_address, make_plan, publish_fragments
from megarl.reshard.transfer.digests import BucketSample
from megarl.reshard.transfer.full_tensor_transfer import receive_full
from megarl.reshard.transfer.shard_transfer import Counts, Route, ShardReceiver, TransferError
from megarl.reshard.transfer.store import AttemptDeadline, Deadline, join_store, read, read_bulk, write
from megarl.reshard.transfer.transports import transport_named
from megarl.reshard.transfer.transports.base import PlainStaging, Staging, Transport
from megarl.reshard.transfer.transports.gloo import GlooTransport

log = logging.getLogger(__name__)

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]  # the model's own loader of checkpoint tensors


class Arrangement(Protocol):
    """Converts between the arrangement that the model computes with and plain copies, of which fragments are views.

    `open` comes before a sync, `settle` after its last message, `close` at its end, also after a failure.
    """

    def open(self) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...


class AsLoaded:
    """No weight is rearranged: the fragments are views of the live parameters."""

    def open(self) -> None:
        """No-op."""

    def settle(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


@dataclass(frozen=True)
class LiveWeights:
    """A rank's weights as a sync sees them. The arrangement is closed; `open` makes the fragments' values valid.

    `complete` is called once all weights have come, for what the model keeps beside them.
    """

    fragments: Sequence[Fragment]
    arrangement: Arrangement = AsLoaded()
    complete: Callable[[], object] = lambda: None


class ServerRank:
    """This rank in one group: from the order that made it join, to a failure or the order of another group."""

    def __init__(self, order: ServerOrder, live: LiveWeights, rank: int, size: int):
        self.order = order
        self.fragments, self.arrangement, self._complete = live.fragments, live.arrangement, live.complete
        self.rank = rank
        self.server_group = ServerGroup(order.server, order.epoch, size)
        self.store = join_store(order.address, order.port, order.deadline_ms / 1000)
        self._watched_store = join_store(order.address, order.port, order.deadline_ms / 1000)
        self.private_store = self.server_group.private_store(self.store)
        self.address = local_address(order.address, order.port)
        self.group: Transport | None = None
        self.staging: Staging = PlainStaging(0)
        self._plan: TransferPlan | None = None
        self._receiver: ShardReceiver | None = None
        self._world = ""  # name of the world that the plan is for
        self._sources: list[int] = []  # trainer ranks whose weights this rank gets
        self._relay_groups = RelayGroups(self.store, self.address)
        write(self.private_store, f"layout/{rank}", {"size": size, **publish_fragments(self.store, self.fragments)})

    def receive_weights(self, attempt_number: int, deadline: Deadline, load: LoadWeights) -> dict[str, Any]:
        """Receives the weights of one attempt. Returns the report for the trainer, JSON.

        Raises:
            TransferError: the trainer left or was late.
            PlanError: the two sides do not fit together.
            RuntimeError, OSError, ValueError: the attempt was called off, or a group, store or transport failed.
        """
        if platform.has_gpu():  # an in-place pause leaves the last batch running, and it reads the weights
            torch.cuda.synchronize()
        spec = read_spec(self.store, attempt_number, deadline)
        if spec is None:
            raise RuntimeError("the trainer gave this push up")
        sample = BucketSample(spec.modulus, spec.remainder)
        if spec.path != "exact":
            if self.group is None and spec.path == "full":
                size = self.server_group.size + 1
                self.group = GlooTransport(self.private_store, self.address, self.rank + 1, size, deadline.left())
            group = self.group if isinstance(self.group, GlooTransport) else None
            nbytes = receive_full(self.private_store, group, attempt_number, deadline, load)
            self._complete()
            digests = [digest(f.view) for f in self.fragments] if sample.modulus else []
            return {"bytes": nbytes, "held": digests}
        try:
            self.arrangement.open()
            receiver = self._prepare(attempt_number, spec, deadline)
            counts: Counts = {}
            if spec.delta:
                for source in self._sources:
                    counts.update(read_bulk(self.store, key(attempt_number, "counts", source), deadline))
            seconds = deadline.left()
            if receiver.relays.sources or receiver.relays.targets:  # names who it waits for before the trainer gives up
                seconds = min(spec.relayed_s, seconds)
            deadline = AttemptDeadline(seconds, self._watched_store, key(attempt_number, "verdict"))
            received = receiver.receive(deadline, counts)
            self.arrangement.settle()
            self._complete()
            held = list(receiver.read_back(sample).items())
            return {"bytes": received.nbytes, "forwarded": received.forwarded_nbytes, "held": held}
        finally:
            self.arrangement.close()

    def _prepare(self, attempt_number: int, spec: AttemptSpec, deadline: Deadline) -> ShardReceiver:
        """Makes the plan, joins the group, and waits until all ranks are known to have the same plan."""
        places = [
            (number, server)
            for number, server, rank in spec.server_ranks()
            if server.index == self.order.server and rank == self.rank
        ]
        if len(places) != 1 or replace(places[0][1], transport_name="") != self.server_group:
            raise RuntimeError(f"rank {self.rank} of {self.server_group.size} is not part of the trainer's attempt")
        number, server = places[0]
        if self._plan is None or self._world != spec.world:
            world = read_bulk(self.store, f"world/{spec.world}", deadline)
            self._plan, self._world, self._receiver = make_plan(self.store, world, deadline), spec.world, None
        if self.group is None:
            transport_class = transport_named(server.transport_name)
            self.staging = transport_class.make_receiver_staging(spec.bucket_bytes)
            size = spec.senders + self.server_group.size
            self.group = transport_class(
                self.private_store, self.address, spec.senders + self.rank, size, deadline.left(), self.staging
            )
        if self._receiver is None:
            routes = {rank: Route(f"trainer rank {rank}", self.group, rank) for rank in range(spec.senders)}
            fragments = sent(self.fragments, spec.adapters_only)
            relays = self._relay_groups.join(self._plan, number, attempt_number, spec, self.staging)
            self._receiver = ShardReceiver(self._plan, number, fragments, routes, self.staging, relays)
            self._sources = self._plan.sources_of(number)
        write(self.store, key(attempt_number, "hash", "server", number), {"hash": self._plan.hash})
        if not read(self.store, key(attempt_number, "go"), deadline):
            raise TransferError("trainer rank 0 called the push off", peer="trainer rank 0", tensor="")
        return self._receiver

    def report(self, attempt_number: int, result: dict[str, Any]) -> None:
        write(self.private_store, key(attempt_number, "result", self.rank), result)

    def leave(self) -> None:
        """Ends the group's connections and frees the staging memory."""
        if self.group is not None:
            self.group.abort()
        self._relay_groups.leave()
        self.staging.close()


# SGLang's hook is a plain function without an object of its own, so the group between two orders is kept here. A
# scheduler process is one tensor-parallel rank and handles one order at a time.
_server_rank: ServerRank | None = None


def carry_out(order: ServerOrder, live: Callable[[], LiveWeights], rank: int, size: int, load: LoadWeights) -> None:
    """Carries out one order. `live` lists this rank's weights; called once per group."""
    global _server_rank
    deadline = Deadline(order.deadline_ms / 1000)
    try:
        if _server_rank is not None and _server_rank.order.group != order.group:
            _server_rank.leave()
            _server_rank = None
        if _server_rank is None and not order.join:
            raise RuntimeError(
                "it is not in the trainer's group: it was restarted, or another trainer pushed to it since"
            )
        if _server_rank is None:
            _server_rank = ServerRank(order, live(), rank, size)
        result = _server_rank.receive_weights(order.attempt_number, deadline, load)
    except Exception as error:
        log.exception("attempt %d failed in rank %d", order.attempt_number, rank)
        if _server_rank is not None:
            _server_rank.leave()
            _server_rank = None
        result = {"error": f"{type(error).__name__}: {error}"}
        if isinstance(error, (PlanError, TransferError)):
            result["tensor"] = error.tensor
        if isinstance(error, TransferError):
            result["peer"] = error.peer
        try:  # over a new connection, as the group's own may be broken
            store = join_store(order.address, order.port, timeout_s=5)
            private_store = ServerGroup(order.server, order.epoch, size).private_store(store)
            write(private_store, key(order.attempt_number, "result", rank), result)
        except RuntimeError:
            log.exception(
                "attempt %d: the failure could not be reported; the trainer's deadline will end it",
                order.attempt_number,
            )
        return
    try:
        _server_rank.report(order.attempt_number, result)
    except RuntimeError:  # the trainer has left meanwhile
        log.exception("attempt %d succeeded in rank %d and could not be reported", order.attempt_number, rank)
        _server_rank.leave()
        _server_rank = None
