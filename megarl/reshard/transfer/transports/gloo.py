"""Messages over TCP by gloo: host memory, any network. The only transport that also broadcasts (the full path)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, Work

from megarl.reshard.transfer.store import POLL_S, Deadline
from megarl.reshard.transfer.transports.base import Staging, Transport

SENDER = 0  # the trainer rank that broadcasts


class GlooMessage:
    """A message that gloo sends from, or receives into, `payload`."""

    def __init__(self, work: Work, payload: Tensor):
        self._work = work
        self._payload = payload

    def wait(self, deadline: Deadline) -> Tensor:
        try:
            self._work.wait(timedelta(seconds=deadline.left()))
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise TimeoutError(f"deadline of {deadline.seconds:g} s passed") from error
            raise
        return self._payload

    def release(self) -> None:
        """Does nothing: the bytes are in this rank's own memory."""


class GlooTransport(Transport):
    """Messages by gloo's send and recv; without `staging` the group only broadcasts."""

    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_s: float, staging: Staging | None = None):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        self.staging = staging
        self._group: ProcessGroupGloo | None = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)

    @property
    def group(self) -> ProcessGroupGloo:
        if self._group is None:
            raise RuntimeError("this rank has left the group")
        return self._group

    def send(self, slot: int, nbytes: int, peer: int, tag: int) -> GlooMessage:
        assert self.staging is not None, "made without staging: broadcasts only"
        return self.send_tensor(self.staging.slots[slot][:nbytes], peer, tag)

    def receive(self, slot: int, nbytes: int, peer: int, tag: int) -> GlooMessage:
        assert self.staging is not None, "made without staging: broadcasts only"
        return self.receive_tensor(self.staging.slots[slot][:nbytes], peer, tag)

    def send_tensor(self, tensor: Tensor, peer: int, tag: int) -> GlooMessage:
        """Starts to send a contiguous CPU tensor, which must not change until the wait is over."""
        return GlooMessage(self.group.send([tensor], peer, tag), tensor)  # type: ignore[attr-defined]

    def receive_tensor(self, tensor: Tensor, peer: int, tag: int) -> GlooMessage:
        """Starts to receive into a contiguous CPU tensor."""
        return GlooMessage(self.group.recv([tensor], peer, tag), tensor)  # type: ignore[attr-defined]

    def broadcast(self, tensor: Tensor, deadline: Deadline) -> Work:
        """Starts a broadcast of a contiguous CPU tensor from the sender; end it with `wait`."""
        options = BroadcastOptions()
        options.rootRank = SENDER
        options.timeout = timedelta(seconds=deadline.left())
        return self.group.broadcast([tensor], options)  # type: ignore[attr-defined]

    def abort(self) -> None:
        """Wakes this rank's own waits; the connections end with the group itself."""
        if self._group is not None:
            self._group.abort()
            self._group = None


def wait(work: Work, deadline: Deadline, watch: Callable[[], None] | None = None) -> None:
    """Waits for a broadcast. `watch` is called meanwhile and may raise."""
    if watch is not None:
        while not work.is_completed():
            watch()
            deadline.left()
            time.sleep(POLL_S)
    work.wait(timedelta(seconds=deadline.left()))
