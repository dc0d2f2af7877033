"""Torch's `ProcessGroupNCCL` over gloo, as the weight sync's nccl transport makes it, between two programs.

Covers:

- A send or receive builds the communicator of its pair. The caller waits there, without a limit, until the peer does.
  Two ranks on one `GPU` are refused.
- The operations of a pair run in the order of issue, and a send ends when its receive has run.
- The watchdog of a group ends the process when an operation exceeds `options._timeout` or fails.
- With `TORCH_NCCL_BLOCKING_WAIT=1` there is no watchdog, and `wait` raises.
- `abort` ends this rank's operations alone.
- A peer that dies goes unnoticed, or is an error if `DEAD_PEERS_ARE_NOTICED`: both occur, by the way to the peer.

Does not cover CUDA streams, staging memory on a device, other modes of `TORCH_NCCL_ASYNC_ERROR_HANDLING`, the heartbeat
monitor, or collectives. The rank that reads NCCL's identifier from the store has a deadline there; here it has none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from tests.nccl_semantics.communicator import Communicator, NcclError, Watchdog, Work

DEAD_PEERS_ARE_NOTICED = False
GPU = ""  # of this process; "": one of its own
NEVER = timedelta(days=1)


class Options:
    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)


class ProcessGroupNCCL:
    """One rank's end of a group."""

    Options = Options

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        self._store, self._rank = store, rank
        self._timeout_s = options._timeout.total_seconds()
        blocking_wait = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self._watchdog = None if blocking_wait else Watchdog(rank)
        self._pairs: dict[int, tuple[ProcessGroupGloo, Communicator]] = {}
        self._pending: list[Work] = []
        self._aborted = threading.Event()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._submit("send to", peer, lambda pair, other: pair.send(tensors, other, 0))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._submit("recv from", peer, lambda pair, other: pair.recv(tensors, other, 0))

    def abort(self) -> None:
        self._aborted.set()
        for work in self._pending:
            work.end(NcclError("the communicator was aborted"))

    def _submit(self, name: str, peer: int, start: Callable[[ProcessGroupGloo, int], dist.Work]) -> Work:
        pair, communicator = self._pair(peer)
        if self._aborted.is_set():
            raise NcclError("the communicator was aborted")

        def run() -> None:
            try:
                start(pair, int(self._rank < peer)).wait(NEVER)
            except RuntimeError as error:
                if not DEAD_PEERS_ARE_NOTICED:
                    self._aborted.wait()
                elif self._watchdog is not None:
                    self._watchdog.end([f"{name} {peer} failed: {error}"])
                raise

        work = communicator.submit(f"{name} {peer}", run)
        self._pending.append(work)
        return work

    def _pair(self, peer: int) -> tuple[ProcessGroupGloo, Communicator]:
        if peer not in self._pairs:
            low, high = sorted((self._rank, peer))
            store = PrefixStore(f"{low}:{high}", self._store)
            store.set(f"GPU of {self._rank}", GPU)
            store.wait([f"GPU of {peer}"], NEVER)
            if GPU and store.get(f"GPU of {peer}").decode() == GPU:
                raise NcclError(f"Duplicate GPU detected : rank {low} and rank {high} both on CUDA device {GPU}")
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = NEVER
            pair = ProcessGroupGloo(store, int(self._rank > peer), 2, options)
            name = f"pair (ranks {low}, {high})"
            self._pairs[peer] = pair, Communicator(name, self._timeout_s, self._watchdog)
        return self._pairs[peer]
