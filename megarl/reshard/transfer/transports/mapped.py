"""Base of the transports by which a receiver reads the sender's staging memory: shared memory, CUDA IPC, RDMA.

Only a slot's number travels (over gloo), and an acknowledgement back, after which the sender may fill the slot again.
Where the memory can be mapped it is read in place. A receiver's own staging memory is for reading weights back.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from megarl.parallel import platform
from megarl.reshard.transfer.store import Deadline, read, write
from megarl.reshard.transfer.transports.base import Staging, Transport
from megarl.reshard.transfer.transports.gloo import GlooMessage, GlooTransport


class OfferedMessage:
    """The sender's end of a message: over when the receiver has acknowledged it."""

    def __init__(self, notice: GlooMessage, acknowledgement: GlooMessage, payload: Tensor):
        self._notice = notice
        self._acknowledgement = acknowledgement
        self._payload = payload

    def wait(self, deadline: Deadline) -> Tensor:
        self._notice.wait(deadline)
        self._acknowledgement.wait(deadline)
        return self._payload

    def release(self) -> None:
        """Does nothing: only receivers release."""


class MappedMessage:
    """The receiver's end of a message: a view of the sender's memory, or a copy in the receiver's own `slot`."""

    def __init__(self, transport: MappedTransport, peer: int, tag: int, slot: int, nbytes: int):
        self._transport = transport
        self._peer = peer
        self._tag = tag
        self._slot = slot
        self._nbytes = nbytes
        self._notice = transport.gloo.receive_tensor(torch.empty(1, dtype=torch.int64), peer, 2 * tag)

    def wait(self, deadline: Deadline) -> Tensor:
        offered = int(self._notice.wait(deadline).item())
        return self._transport.fetch(self._peer, offered, self._slot, self._nbytes, deadline)

    def release(self) -> None:
        self._transport.settle()
        done = torch.ones(1, dtype=torch.int64)
        self._transport.acknowledged.append(self._transport.gloo.send_tensor(done, self._peer, 2 * self._tag + 1))


class MappedTransport(Transport):
    """Messages in the sender's staging memory, which a subclass describes to peers and maps from their descriptions."""

    in_place = True

    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_s: float, staging: Staging):
        self.staging = staging
        self.acknowledged: list[GlooMessage] = []  # kept alive, as gloo sends from their memory
        self._store = store
        self._timeout_s = timeout_s
        self._rank = rank
        self._mapped: dict[int, Any] = {}
        self._described: set[int] = set()
        self.gloo = GlooTransport(store, host, rank, size, timeout_s)

    @abstractmethod
    def describe(self) -> Any:
        """JSON with which one peer can map this rank's staging memory. Called once for each peer."""

    @abstractmethod
    def map(self, described: Any) -> Any:
        """Maps the staging memory of a peer, from its description. Returns what `fetch` needs, slot by slot."""

    def fetch(self, peer: int, remote_slot: int, slot: int, nbytes: int, deadline: Deadline) -> Tensor:
        """The bytes in a peer's slot: a view of mapped memory. `slot` is this rank's own, for transports that copy."""
        return self.slots_of(peer)[remote_slot][:nbytes]

    def settle(self) -> None:
        """Waits for this stream's copies: a slot is offered once packed and acknowledged once read.

        On the host a copy is over when it returns.
        """
        if platform.has_gpu():
            torch.cuda.current_stream().synchronize()

    def slots_of(self, peer: int) -> Any:
        """A peer's staging buffers as `map` gives them, mapped at the first call."""
        if peer not in self._mapped:
            described = read(self._store, f"staging/{peer}/{self._rank}", Deadline(self._timeout_s))
            self._mapped[peer] = self.map(described)
        return self._mapped[peer]

    def send(self, slot: int, nbytes: int, peer: int, tag: int) -> OfferedMessage:
        if peer not in self._described:
            write(self._store, f"staging/{self._rank}/{peer}", self.describe())
            self._described.add(peer)
        self.settle()
        notice = self.gloo.send_tensor(torch.tensor([slot], dtype=torch.int64), peer, 2 * tag)
        acknowledgement = self.gloo.receive_tensor(torch.empty(1, dtype=torch.int64), peer, 2 * tag + 1)
        return OfferedMessage(notice, acknowledgement, self.staging.slots[slot][:nbytes])

    def receive(self, slot: int, nbytes: int, peer: int, tag: int) -> MappedMessage:
        if len(self.acknowledged) > 64:
            self.acknowledged = self.acknowledged[-16:]
        return MappedMessage(self, peer, tag, slot, nbytes)

    def abort(self) -> None:
        self.gloo.abort()
        self._mapped.clear()
