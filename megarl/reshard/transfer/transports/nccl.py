"""Messages between GPUs by NCCL's point-to-point operations. Not measured.

A group spans the trainer ranks and one server's ranks, each on its own GPU (NCCL allows one rank per GPU). Use cuda_ipc
where they share one. NCCL connects a pair at its first message, so a group costs only the pairs of the plan.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work

from megarl.reshard.transfer.store import POLL_S, Deadline
from megarl.reshard.transfer.transports.base import PlainStaging, Staging, Transport


class NcclMessage:
    """A message on the group's stream. NCCL does not notice a dead peer, so the wait checks the deadline."""

    def __init__(self, work: Work, payload: Tensor):
        self._work = work
        self._payload = payload

    def wait(self, deadline: Deadline) -> Tensor:
        while not self._work.is_completed():
            deadline.left()
            time.sleep(POLL_S)
        self._work.wait()  # raises NCCL's error, and orders the current stream behind the message
        return self._payload

    def release(self) -> None:
        torch.cuda.current_stream().synchronize()  # the slot is received into again from another stream


class NcclTransport(Transport):
    """Messages by NCCL's send and recv, between staging buffers on the current device."""

    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_s: float, staging: Staging):
        from torch.distributed import ProcessGroupNCCL  # absent from builds of torch without CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self.staging = staging
        self.group = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)

    @classmethod
    def make_staging(cls, bucket_bytes: int) -> Staging:
        return PlainStaging(bucket_bytes, torch.device("cuda", torch.cuda.current_device()))

    def send(self, slot: int, nbytes: int, peer: int, tag: int) -> NcclMessage:
        """Ignores the tag, which NCCL lacks: messages of a pair arrive in the order they were sent, the plan's."""
        payload = self.staging.slots[slot][:nbytes]
        return NcclMessage(self.group.send([payload], peer, tag), payload)  # type: ignore[attr-defined]

    def receive(self, slot: int, nbytes: int, peer: int, tag: int) -> NcclMessage:
        payload = self.staging.slots[slot][:nbytes]
        return NcclMessage(self.group.recv([payload], peer, tag), payload)  # type: ignore[attr-defined]

    def abort(self) -> None:
        self.group.abort()
