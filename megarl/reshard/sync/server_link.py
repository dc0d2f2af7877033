"""Rank 0's connection to one server: its endpoints, its part of the store, and its state."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed import Store

from megarl.reshard.config import AUTO
from megarl.reshard.plan.holdings import Box, dtype_of
from megarl.reshard.sync.attempt import ServerGroup, key
from megarl.reshard.sync.server_control import PendingCall, ServerControl, ServerControlError
from megarl.reshard.sync.server_order import ServerOrder
from megarl.reshard.sync.sglang_hooks import UPDATED_MODEL, order_body
from megarl.reshard.sync.world import described_boxes
from megarl.reshard.transfer.full_tensor_transfer import ABANDONED, header_key
from megarl.reshard.transfer.store import Deadline, read, read_bulk, write
from megarl.reshard.transfer.transports.gloo import SENDER, GlooTransport

EXPLAIN_S = 2.0  # time for a server to say why it broke a transfer


class RankFailure(ServerControlError):
    """The report of a server rank that failed. `peer` is the rank it waited for, "" where the fault is its own."""

    def __init__(self, rank: int, report: dict[str, Any]):
        super().__init__(f"rank {rank} of the server: {report['error']}")
        self.rank = rank
        self.peer = str(report.get("peer", ""))
        self.tensor = str(report.get("tensor", ""))


class NoAnswer(ServerControlError):
    """A server did not say in time how its order went."""


class ServerLink:
    """Rank 0's connection to one server. A dirty server holds weights that are unknown or not current."""

    def __init__(self, index: int, address: str, api_key: str):
        self.index = index
        self.address = address
        self.tp_size = 1  # asked of the server before the first sync
        self.control = ServerControl(address, api_key)
        self.dirty = False
        self.version_checked = False  # True once its version was compared with the session's
        self.epoch = 0
        self.transport_name = ""  # transport of the joined group; "": none is joined
        self.layout: list[dict[str, Any]] = []  # published by each rank
        self.attempt_number = 0
        self._order_call: PendingCall | None = None
        self._begin_call: PendingCall | None = None
        self._end_call: PendingCall | None = None
        self._order_answer: bool | Exception | None = None  # None: no answer yet
        self._store: Store | None = None
        self._private_store: Store | None = None
        self._broadcast_group: GlooTransport | None = None
        self._announced = 0

    @property
    def broadcast_group(self) -> GlooTransport:
        """The group of rank 0 and the server's ranks, on the full path."""
        assert self._broadcast_group is not None, "joined for the full path only"
        return self._broadcast_group

    @property
    def private_store(self) -> Store:
        """The part of the store that belongs to this server's group."""
        assert self._private_store is not None, "open first"
        return self._private_store

    @property
    def server_group(self) -> ServerGroup:
        return ServerGroup(self.index, self.epoch, self.tp_size, self.transport_name)

    def joined(self, transport_name: str) -> bool:
        """True if the server's ranks are in a group for this transport; any message transport suits `auto`."""
        if transport_name == AUTO:
            return self.transport_name not in ("", "full", "disk")
        return self.transport_name == transport_name

    def open(
        self,
        store: Store,
        host: str,
        port: int,
        session: int,
        attempt_number: int,
        transport_name: str,
        flush: bool,
        wait_s: float,
    ) -> None:
        """Sends the order that makes the server's ranks call `receive`, in an update session of its own.

        It is answered when they are done, and have dropped their caches if `flush`.
        """
        if self.transport_name and not self.joined(transport_name):
            self.leave()
        self.attempt_number = attempt_number
        self._announced = 0
        self._order_answer = None
        self._store = store
        self._private_store = self.server_group.private_store(store)
        order = ServerOrder.of(
            host,
            port=port,
            server=self.index,
            session=session,
            epoch=self.epoch,
            join=int(not self.transport_name),
            attempt_number=attempt_number,
            deadline_ms=int(wait_s * 1000),
        )
        body = order_body(order, self.tp_size, flush)
        deadline = Deadline(wait_s)
        self._begin_call = self.control.send("/begin_weight_update", UPDATED_MODEL, deadline)
        self._order_call = self.control.send("/update_weights_from_tensor", body, deadline)
        self._end_call = self.control.send("/end_weight_update", {}, deadline)

    def await_begin(self, deadline: Deadline) -> None:
        """Waits until the update session is open: this one, or one that a failed push has left."""
        assert self._begin_call is not None, "open first"
        try:
            self._begin_call.result(deadline)
        except ServerControlError as error:
            if "already open" not in str(error):
                raise

    def await_end(self, deadline: Deadline) -> None:
        """Waits until the update session has ended."""
        assert self._end_call is not None, "open first"
        self._end_call.result(deadline)

    def read_layout(self, transport_name: str, deadline: Deadline) -> None:
        """Reads each rank's layout, unless it is known; the group itself is joined by the trainer ranks.

        Until `use` is called, a group for `auto` has no transport.
        """
        if self.transport_name:
            return
        self.layout = [read(self.private_store, f"layout/{rank}", deadline, self.watch) for rank in range(self.tp_size)]
        if (sizes := {rank["size"] for rank in self.layout}) != {self.tp_size}:
            raise ServerControlError(f"the server has tp_size {sorted(sizes)}, and the trainer expects {self.tp_size}")
        self.transport_name = transport_name

    def use(self, transport_name: str) -> bool:
        """Settles the transport of a group that was joined for `auto`. False if the group has another one already."""
        if self.transport_name == AUTO:
            self.transport_name = transport_name
        return self.transport_name == transport_name

    def join_broadcast_group(self, host: str, deadline: Deadline) -> None:
        """Makes the group of rank 0 and the server's ranks, for the full path."""
        if self._broadcast_group is None:
            self._broadcast_group = GlooTransport(self.private_store, host, SENDER, self.tp_size + 1, deadline.left())

    def held_boxes(self, deadline: Deadline) -> list[list[tuple[Box, torch.dtype]]]:
        """Each rank's boxes and their dtypes, in the rank's own order."""
        assert self._store is not None, "open first"
        published = [read_bulk(self._store, rank["holdings"], deadline) for rank in self.layout]
        return [[(box, dtype_of(dtype)) for box, dtype in described_boxes(rank)] for rank in published]

    def announce(self, header: Any) -> None:
        """Puts the next header of a full push into the store, for every rank of the server."""
        write(self.private_store, header_key(self.attempt_number, self._announced), header)
        self._announced += 1

    def _await_answer(self, deadline: Deadline) -> None:
        """Waits until every rank has answered the order. May be called again.

        Raises RankFailure for a rank that reported an error, else the error of the HTTP call.
        """
        if self._order_answer is None:
            assert self._order_call is not None, "open first"
            try:
                self._order_call.result(deadline)
                self._order_answer = True
            except (ServerControlError, OSError) as error:
                self._order_answer = error
        if isinstance(self._order_answer, Exception):
            raise self._order_answer
        for rank in range(self.tp_size):
            name = key(self.attempt_number, "result", rank)
            if self.private_store.check([name]) and "error" in (report := read(self.private_store, name, deadline)):
                raise RankFailure(rank, report)

    def order_error(self, deadline: Deadline | None) -> Exception | None:
        """The error that ended the order, waited for until the deadline; None if all ranks carried it out.

        Without a deadline, None also means that the order is still under way.
        """
        assert self._order_call is not None, "open first"
        if not self._order_call.answered(0.0 if deadline is None else max(deadline.end - time.monotonic(), 0.0)):
            return None if deadline is None else NoAnswer(f"it did not answer within {deadline.seconds:g} s")
        try:
            self._await_answer(Deadline(EXPLAIN_S))
        except (RuntimeError, OSError) as error:
            return error
        return None

    def watch(self) -> None:
        """Raises if the server has answered already: it has failed, as it answers last."""
        if self._order_call is not None and self._order_call.answered():
            self._await_answer(Deadline(EXPLAIN_S))
            raise ServerControlError("the server ended the transfer before all weights were sent")

    def explain(self, error: Exception) -> Exception:
        """The server's own reason for a broken transfer: its answer comes a moment after the connections end."""
        if isinstance(error, TimeoutError):
            return error
        reason = self.order_error(Deadline(EXPLAIN_S))
        return error if reason is None or isinstance(reason, NoAnswer) else reason

    def finish(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Waits until every rank has applied the weights. Returns each rank's report."""
        self._await_answer(deadline)
        self._order_call = None
        reports = []
        for rank in range(self.tp_size):
            name = key(self.attempt_number, "result", rank)
            reports.append(read(self.private_store, name, deadline))
            self.private_store.delete_key(name)
        for index in range(self._announced):
            self.private_store.delete_key(header_key(self.attempt_number, index))
        return reports

    def leave(self) -> None:
        """Gives up the group and everything under way: the next sync joins anew."""
        if self._order_call is not None:
            self.announce(ABANDONED)
            self._order_call.cancel()
            self._order_call = None
        if self._broadcast_group is not None:
            self._broadcast_group.abort()
            self._broadcast_group = None
        self.transport_name = ""
        self.version_checked = False  # another trainer may push to it meanwhile
        self.epoch += 1
