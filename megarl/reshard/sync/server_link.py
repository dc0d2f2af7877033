"""Rank 0's connection to one server: its endpoints, its part of the store, and how it stands."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed import Store

from megarl.reshard.plan.holdings import Box
from megarl.reshard.sync.attempt import ServerGroup, group_store, key
from megarl.reshard.sync.server_rank import Order
from megarl.reshard.sync.sglang_hooks import PendingCall, ServerControl, ServerControlError, order_body
from megarl.reshard.sync.world import boxes_of
from megarl.reshard.transfer.full_tensor_transfer import ABANDONED, dtype_of, header_key
from megarl.reshard.transfer.store import Deadline, read, read_bulk, write
from megarl.reshard.transfer.transports.gloo import SENDER, GlooTransport

EXPLAIN_S = 2.0  # how long a server may take to say why it broke a transfer


class RankFailure(ServerControlError):
    """What one rank of a server reported. `peer` is whom it waited for, "" where the fault is its own."""

    def __init__(self, rank: int, told: dict[str, Any]):
        super().__init__(f"rank {rank} of the server: {told['error']}")
        self.rank = rank
        self.peer = str(told.get("peer", ""))
        self.tensor = str(told.get("tensor", ""))


class NoAnswer(ServerControlError):
    """A server did not say in time how its order went."""


class ServerLink:
    """Rank 0's connection to one server."""

    def __init__(self, index: int, address: str, api_key: str):
        self.index = index
        self.address = address
        self.tp_size = 1  # asked of the server before the first sync
        self.control = ServerControl(address, api_key)
        self.dirty = False  # what it holds is not known, or not current
        self.checked = False  # whether the version that it serves has been looked at
        self.epoch = 0
        self.carrier = ""  # that the group was joined for; "": not joined
        self.layout: list[dict[str, Any]] = []  # what each rank published
        self.pending: PendingCall | None = None
        self._begun: PendingCall | None = None
        self._ended: PendingCall | None = None
        self._answered: bool | Exception | None = None
        self.sequence = 0
        self._store: Store | None = None
        self._private: Store | None = None
        self._broadcasts: GlooTransport | None = None
        self._announced = 0

    @property
    def group(self) -> GlooTransport:
        """For broadcasts, on the full path."""
        assert self._broadcasts is not None, "joined for the full path only"
        return self._broadcasts

    @property
    def private(self) -> Store:
        assert self._private is not None, "open first"
        return self._private

    @property
    def member(self) -> ServerGroup:
        return ServerGroup(self.index, self.epoch, self.tp_size)

    def open(
        self, store: Store, host: str, port: int, session: int, sequence: int, carrier: str, flush: bool, wait_s: float
    ) -> None:
        """Sends the order that makes the server's ranks call `receive`, in an update session of its own. It is answered
        when they are done, and have dropped their caches if `flush`."""
        if self.carrier not in ("", carrier):
            self.leave()
        self.sequence = sequence
        self._announced = 0
        self._answered = None
        self._store = store
        self._private = group_store(store, self.index, self.epoch)
        order = Order.of(
            host,
            port=port,
            server=self.index,
            session=session,
            epoch=self.epoch,
            join=int(not self.carrier),
            sequence=sequence,
            deadline_ms=int(wait_s * 1000),
        )
        body = order_body(order, self.tp_size, flush)
        deadline = Deadline(wait_s)
        self._begun = self.control.send("/begin_weight_update", {}, deadline)
        self.pending = self.control.send("/update_weights_from_tensor", body, deadline)
        self._ended = self.control.send("/end_weight_update", {}, deadline)

    def begun(self, deadline: Deadline) -> None:
        """Waits until the update session is open: this one, or one that a failed push has left."""
        assert self._begun is not None, "open first"
        try:
            self._begun.result(deadline)
        except ServerControlError as error:
            if "already open" not in str(error):
                raise

    def ended(self, deadline: Deadline) -> None:
        """Waits until the update session has ended."""
        assert self._ended is not None, "open first"
        self._ended.result(deadline)

    def join(self, carrier: str, deadline: Deadline) -> None:
        """Reads what each rank holds, unless it is known; the group itself is joined by the trainer ranks."""
        if self.carrier:
            return
        self.layout = [read(self.private, f"layout/{rank}", deadline, self.watch) for rank in range(self.tp_size)]
        if (found := {rank["size"] for rank in self.layout}) != {self.tp_size}:
            raise ServerControlError(f"the server has tp_size {sorted(found)}, and the trainer expects {self.tp_size}")
        self.carrier = carrier

    def join_broadcasts(self, host: str, deadline: Deadline) -> None:
        """Makes the group of rank 0 and the server's ranks, for the full path."""
        if self._broadcasts is None:
            self._broadcasts = GlooTransport(self.private, host, SENDER, self.tp_size + 1, deadline.left())

    def held(self, deadline: Deadline) -> list[list[tuple[Box, torch.dtype]]]:
        """What each rank holds, in its own order."""
        assert self._store is not None, "open first"
        published = [read_bulk(self._store, rank["holdings"], deadline) for rank in self.layout]
        return [[(box, dtype_of(dtype)) for box, dtype in boxes_of(rank)] for rank in published]

    def announce(self, header: Any) -> None:
        """Puts the next header of a full push into the store, for every rank of the server."""
        write(self.private, header_key(self.sequence, self._announced), header)
        self._announced += 1

    def _answer(self, deadline: Deadline) -> None:
        """Waits until every rank has answered the order. Raises what went wrong; may be asked again."""
        if self._answered is None:
            assert self.pending is not None, "open first"
            try:
                self.pending.result(deadline)
                self._answered = True
            except (ServerControlError, OSError) as error:
                self._answered = error
        if isinstance(self._answered, Exception):
            raise self._answered
        for rank in range(self.tp_size):
            name = key(self.sequence, "result", rank)
            if self.private.check([name]) and "error" in (told := read(self.private, name, deadline)):
                raise RankFailure(rank, told)

    def verdict(self, deadline: Deadline | None) -> Exception | None:
        """How the order went, as the server tells it before the deadline: None where all ranks carried it out.

        Without a deadline, what has gone wrong so far.
        """
        assert self.pending is not None, "open first"
        if not self.pending.answered(0.0 if deadline is None else max(deadline.end - time.monotonic(), 0.0)):
            return None if deadline is None else NoAnswer(f"it did not answer within {deadline.seconds:g} s")
        try:
            self._answer(Deadline(EXPLAIN_S))
        except (RuntimeError, OSError) as error:
            return error
        return None

    def watch(self) -> None:
        """Raises if the server has answered already: it has failed, as it answers last."""
        if self.pending is not None and self.pending.answered():
            self._answer(Deadline(EXPLAIN_S))
            raise ServerControlError("the server ended the transfer before all weights were sent")

    def explain(self, error: Exception) -> Exception:
        """The server's own reason for a broken transfer: its answer comes a moment after the connections end."""
        if isinstance(error, TimeoutError):
            return error
        told = self.verdict(Deadline(EXPLAIN_S))
        return error if told is None or isinstance(told, NoAnswer) else told

    def finish(self, deadline: Deadline) -> list[dict[str, Any]]:
        """Waits until every rank has applied the weights. Returns what each reports."""
        self._answer(deadline)
        self.pending = None
        results = []
        for rank in range(self.tp_size):
            name = key(self.sequence, "result", rank)
            results.append(read(self.private, name, deadline))
            self.private.delete_key(name)
        for index in range(self._announced):
            self.private.delete_key(header_key(self.sequence, index))
        return results

    def leave(self) -> None:
        """Gives up the group and whatever is under way: the next sync joins anew."""
        if self.pending is not None:
            self.announce(ABANDONED)
            self.pending.cancel()
            self.pending = None
        if self._broadcasts is not None:
            self._broadcasts.abort()
            self._broadcasts = None
        self.carrier = ""
        self.checked = False  # another trainer may push to it meanwhile
        self.epoch += 1
