"""Rank 0's end of the connection to one server: its endpoints, and the group with its ranks."""

from __future__ import annotations

import ipaddress
import time
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from megarl.reshard.layout import Box
from megarl.reshard.reference import ABANDONED, dtype_of, header_key
from megarl.reshard.sglang import (
    PROTOCOL,
    WEIGHT_LOADER,
    Order,
    PendingCall,
    ServerControl,
    ServerControlError,
    store_prefix,
)
from megarl.reshard.transports.gloo import SENDER, Deadline, GlooGroup, read, write

EXPLAIN_S = 2.0  # how long a server may take to say why it broke a transfer


class ServerLink:
    """Rank 0's connection to one server: its endpoints, and the group with its ranks."""

    def __init__(self, index: int, address: str, api_key: str):
        self.index = index
        self.address = address
        self.control = ServerControl(address, api_key)
        self.epoch = 0
        self.tp_size = 1
        self.held: list[dict[Box, torch.dtype]] = []  # per rank of the server
        self.pending: PendingCall | None = None
        self._group: GlooGroup | None = None
        self._store: PrefixStore | None = None
        self.sequence = 0
        self._announced = 0

    @property
    def joined(self) -> bool:
        return self._group is not None

    @property
    def group(self) -> GlooGroup:
        assert self._group is not None, "join first"
        return self._group

    @property
    def store(self) -> PrefixStore:
        assert self._store is not None, "open first"
        return self._store

    def open(self, store: TCPStore, host: str, session: int, sequence: int, deadline_s: float, verify: bool) -> None:
        """Sends the request that makes the server's ranks call `receive`; its answer comes when they are done."""
        self.sequence = sequence
        self._announced = 0
        self._store = PrefixStore(store_prefix(self.index, self.epoch), store)
        deadline = Deadline(deadline_s)
        order = Order(
            protocol=PROTOCOL,
            host=int(ipaddress.IPv4Address(host)),
            port=store.port,
            server=self.index,
            session=session,
            epoch=self.epoch,
            join=int(not self.joined),
            sequence=sequence,
            deadline_ms=int(deadline_s * 1000),
            verify=int(verify),
        )
        body = {
            "serialized_named_tensors": [order.payload()] * self.tp_size,
            "load_format": WEIGHT_LOADER,
            "flush_cache": False,
        }
        self.pending = self.control.send("/update_weights_from_tensor", body, deadline)

    def join(self, host: str, deadline: Deadline) -> None:
        """Reads what each rank holds, and makes the group with them."""
        held = []
        for rank in range(self.tp_size):
            layout = read(self.store, f"layout/{rank}", deadline, self.watch)
            boxes = {Box(n, tuple(a), tuple(b)): dtype_of(dtype) for n, a, b, dtype in layout["boxes"]}
            held.append(boxes)
        self.held = held
        self._group = GlooGroup(self.store, host, SENDER, self.tp_size + 1, deadline.left())

    def announce(self, header: Any) -> None:
        """Puts the next header of the push into the store, for every rank of the server."""
        write(self.store, header_key(self.sequence, self._announced), header)
        self._announced += 1

    def watch(self) -> None:
        """Raises if the server has answered already: it has failed, as it answers last."""
        if self.pending is not None and self.pending.answered():
            self.pending.result(Deadline(5))
            for rank in range(self.tp_size):
                key = f"{self.sequence}/result/{rank}"
                if self.store.check([key]):
                    self.raise_failure(rank, read(self.store, key, Deadline(5)))
            raise ServerControlError("the server ended the transfer before all weights were sent")

    def explain(self, error: Exception) -> Exception:
        """The server's own reason for a broken transfer: its answer comes a moment after the connections end."""
        deadline = time.monotonic() + EXPLAIN_S
        while time.monotonic() < deadline and not isinstance(error, TimeoutError):
            try:
                self.watch()
            except (RuntimeError, OSError) as told:
                return told
            time.sleep(0.01)
        return error

    def raise_failure(self, rank: int, result: dict[str, Any]) -> None:
        """Raises what a rank of the server reported, if it reported a failure."""
        if "error" in result:
            raise ServerControlError(f"rank {rank} of the server: {result['error']}")

    def finish(self, deadline: Deadline) -> list[dict[Box, str]]:
        """Waits until every rank has applied the weights. Returns the digests of what each holds."""
        assert self.pending is not None
        self.pending.result(deadline)
        self.pending = None
        held = []
        for rank in range(self.tp_size):
            result = read(self.store, f"{self.sequence}/result/{rank}", deadline)
            self.raise_failure(rank, result)
            held.append({Box(n, tuple(a), tuple(b)): value for n, a, b, value in result["held"]})
            self.store.delete_key(f"{self.sequence}/result/{rank}")
        for index in range(self._announced):
            self.store.delete_key(header_key(self.sequence, index))
        return held

    def abandon(self) -> None:
        """Gives up a failed sync: the connections end, and the next one joins anew."""
        if self.pending is not None:
            self.announce(ABANDONED)
            self.pending.cancel()
            self.pending = None
        if self._group is not None:
            self._group.abort()
            self._group = None
        self.epoch += 1
