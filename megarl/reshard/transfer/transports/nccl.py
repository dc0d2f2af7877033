"""Messages between GPUs by NCCL's point-to-point operations. Not measured.

A group spans the trainer ranks and one server's ranks, each on its own GPU (NCCL allows one rank per GPU). Use cuda_ipc
where they share one. NCCL connects a pair at its first message, so a group costs only the pairs of the plan.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work

from megarl.reshard.transfer.store import POLL_S, Deadline
from megarl.reshard.transfer.transports.base import Staging, Transport

WITHOUT_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


class NcclMessage:
    """A message on the group's stream. NCCL does not notice a dead peer, so the wait checks the deadline."""

    def __init__(self, issued: Future[Work], payload: Tensor):
        self._issued = issued
        self._payload = payload

    def wait(self, deadline: Deadline) -> Tensor:
        self._poll(self._issued.done, deadline)
        work = self._issued.result()
        self._poll(work.is_completed, deadline)
        work.wait()  # raises NCCL's error, and orders the current stream behind the message
        return self._payload

    @staticmethod
    def _poll(done: Callable[[], bool], deadline: Deadline) -> None:
        while not done():
            deadline.left()
            time.sleep(POLL_S)

    def release(self) -> None:
        torch.cuda.current_stream().synchronize()  # the slot is received into again from another stream


class NcclTransport(Transport):
    """Messages by NCCL's send and recv, between staging buffers on the current device.

    A thread issues them, in order. NCCL connects a pair inside the first call and waits there without a deadline for
    the peer (`ncclCommInitRank`), which may have died.
    """

    memory = "gpu"
    on_gpu = True
    bucket_bytes = 256 * 2**20  # 5 ms at 50 GB/s: more than the 2 ms between two looks at a message

    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_s: float, staging: Staging):
        from torch.distributed import ProcessGroupNCCL  # absent from builds of torch without CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self.staging = staging
        with _without_watchdog():
            self.group = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name="megarl-nccl", daemon=True).start()

    def send(self, slot: int, nbytes: int, peer: int, tag: int) -> NcclMessage:
        """Ignores the tag, which NCCL lacks: messages of a pair arrive in the order they were sent, the plan's."""
        return self._issue(self.group.send, slot, nbytes, peer, tag)  # type: ignore[attr-defined]

    def receive(self, slot: int, nbytes: int, peer: int, tag: int) -> NcclMessage:
        return self._issue(self.group.recv, slot, nbytes, peer, tag)  # type: ignore[attr-defined]

    def _issue(self, call: Callable[..., Work], slot: int, nbytes: int, peer: int, tag: int) -> NcclMessage:
        payload, stream = self.staging.slots[slot][:nbytes], torch.cuda.current_stream()
        issued: Future[Work] = Future()

        def issue() -> None:
            try:
                with torch.cuda.stream(stream):  # also selects its device: both belong to the thread
                    issued.set_result(call([payload], peer, tag))
            except Exception as error:
                issued.set_exception(error)

        self._calls.put(issue)
        return NcclMessage(issued, payload)

    def abort(self) -> None:
        self._calls.put(None)
        self.group.abort()


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Makes the calls until None comes."""
    while (call := calls.get()) is not None:
        call()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Groups made inside have no watchdog thread, and `Work.wait` raises NCCL's errors.

    torch's watchdog would end the trainer when one server hangs. No mode of its error handling prevents this: each
    error is also reported to the default group's monitor, which ends the process (ProcessGroupNCCL.cpp, `shouldDump_`).
    The constructor reads the variable.
    """
    before = os.environ.get(WITHOUT_WATCHDOG)
    os.environ[WITHOUT_WATCHDOG] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[WITHOUT_WATCHDOG]
        else:
            os.environ[WITHOUT_WATCHDOG] = before
