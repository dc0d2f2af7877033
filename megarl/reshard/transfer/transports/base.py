"""The interface of a transport: messages between the trainer ranks and one server's ranks, through staging memory.

A rank has two staging buffers of `bucket_bytes`, so that one is filled while the other is in flight. Ranks of a group:
the trainer ranks `0 .. senders - 1`, then the ranks of the server. `torch.distributed.init_process_group` cannot make
these groups: the ranks belong to different programs, each with a default group of its own. Every wait has a deadline,
and `abort` wakes all waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from megarl.parallel import platform
from megarl.reshard.transfer.store import Deadline

SLOTS = 2


class PendingMessage(Protocol):
    """A message in flight."""

    def wait(self, deadline: Deadline) -> Tensor:
        """The message's bytes, uint8. Raises RuntimeError if the peer left, TimeoutError after the deadline."""

    def release(self) -> None:
        """Called by a receiver once it has read the bytes."""


class Staging(ABC):
    """This rank's staging memory, shared by its groups with all servers."""

    slots: list[Tensor]  # SLOTS of uint8 [bucket_bytes]

    @abstractmethod
    def close(self) -> None:
        """Frees memory that would outlive the process."""


def own_device() -> torch.device:
    """This rank's GPU; the host where there is none. A server's rank has chosen its GPU without a variable for it."""
    return torch.device("cuda", torch.cuda.current_device()) if platform.has_gpu() else torch.device("cpu")


class PlainStaging(Staging):
    """Staging in this rank's own memory. On the host it is pinned where there is a GPU, which copies faster then."""

    def __init__(self, bucket_bytes: int, device: torch.device | str = "cpu"):
        pinned = bucket_bytes > 0 and torch.device(device).type == "cpu" and platform.has_gpu()
        self.slots = [
            torch.empty(bucket_bytes, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(SLOTS)
        ]

    def close(self) -> None:
        self.slots = []


class Transport(ABC):
    """One rank's end of a group. `store` must be private to the group (a PrefixStore)."""

    in_place: ClassVar[bool] = False  # True: receivers read the sender's staging memory
    memory: ClassVar[str] = "host"  # kind of the staging memory; in a sync a rank sends from one kind only
    on_gpu: ClassVar[bool] = False  # True: staging memory is on the rank's GPU, if it has one
    bucket_bytes: ClassVar[int] = 64 * 2**20  # of a staging buffer, where reshard.bucket_bytes is 0

    @classmethod
    def make_staging(cls, bucket_bytes: int) -> Staging:
        """Allocates the staging memory that this transport sends from and receives into."""
        return PlainStaging(bucket_bytes, own_device() if cls.on_gpu else "cpu")

    @classmethod
    def make_receiver_staging(cls, bucket_bytes: int) -> Staging:
        """Allocates a receiver's memory. One that reads messages in place needs it to read weights back into."""
        if cls.in_place:
            return PlainStaging(bucket_bytes, own_device() if cls.on_gpu else "cpu")
        return cls.make_staging(bucket_bytes)

    @abstractmethod
    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_s: float, staging: Staging):
        """Joins the group; returns when all `size` ranks have. `host` is the address that this rank listens on."""

    @abstractmethod
    def send(self, slot: int, nbytes: int, peer: int, tag: int) -> PendingMessage:
        """Starts to send the first `nbytes` of staging `slot`, which must not change until the wait is over."""

    @abstractmethod
    def receive(self, slot: int, nbytes: int, peer: int, tag: int) -> PendingMessage:
        """Starts to receive `nbytes`, into staging `slot` where the transport needs one."""

    @abstractmethod
    def abort(self) -> None:
        """Ends the connections: peers that wait on them get an error."""
