"""Trainer and servers on the same GPUs, in turn (`server.colocate=true`).

    sampling   servers have all of their memory; the trainer has given up what actor.offload_while_sampling names
    training   the trainer has all of its memory; the servers have given up weights, KV cache and CUDA graphs
    syncing    weights of both sides; no KV cache, no CUDA graphs, no gradients and no optimizer state

Each side gives up its memory before the other takes it, on all ranks. The memory of a server's weights loses its
content, so a sync follows before the server is asked again. `SeparateGpus` stands for a run whose servers have
GPUs of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch.distributed as dist

from megarl.actor.engine import MegatronEngine
from megarl.actor.gpu.offload import PARTS, EngineMemory
from megarl.parallel.broadcast import broadcast_json
from megarl.reshard.sync.server_control import ServerControl, ServerControlError
from megarl.reshard.transfer.store import Deadline
from megarl.rollout.servers.sglang_server import ServerError
from megarl.rollout.servers.supervisor import Supervisor

log = logging.getLogger(__name__)

# SGLang's tags of memory (srt/constants.py)
WEIGHTS, CACHE = "weights", ("kv_cache", "cuda_graph")
# actor.offload_while_sampling -> parts that leave the GPU
GIVEN_UP: dict[str, tuple[str, ...]] = {"all": PARTS, "optimizer": ("gradients", "optimizer"), "none": ()}


class SeparateGpus:
    """Servers and trainer have GPUs of their own: nothing is given up."""

    servers: ServersInTurn | None = None
    servers_hold_weights = True

    def for_sampling(self) -> None: ...
    def for_training(self) -> None: ...
    def for_sync(self) -> None: ...


class ServersInTurn:
    """Memory of the servers, on rank 0: given up and taken back over HTTP, each call with a deadline.

    A server that has died is skipped. The supervisor restarts it, with all of its memory, while the trainer sleeps.
    """

    def __init__(self, supervisor: Supervisor, api_key: str, deadline_s: float) -> None:
        self.supervisor, self._key, self._deadline_s = supervisor, api_key, deadline_s
        self._released: dict[tuple[str, int], set[str]] = {}  # by address and starts: a server started again has all

    def sleep(self) -> None:
        """Has the servers give up everything. Servers that are being restarted are stopped."""
        self.supervisor.hold_restarts()
        self._release(*CACHE, WEIGHTS)

    def wake_weights(self) -> None:
        """Has the servers allocate the memory of their weights, without content, and nothing else."""
        self.supervisor.allow_restarts()
        self._release(*CACHE)
        self._call("/resume_memory_occupation", lambda released: [tag for tag in (WEIGHTS,) if tag in released])

    def wake(self) -> None:
        """Has the servers allocate everything else. Requests may follow."""
        self._call("/resume_memory_occupation", lambda released: [tag for tag in CACHE if tag in released])

    def _release(self, *tags: str) -> None:
        self._call("/release_memory_occupation", lambda released: [tag for tag in tags if tag not in released])

    def _call(self, path: str, tags_for: Callable[[set[str]], list[str]]) -> None:
        for address in self.supervisor.alive():
            released = self._released.setdefault((address, self.supervisor.starts(address)), set())
            tags = tags_for(released)
            if not tags:
                continue
            deadline, control = Deadline(self._deadline_s), ServerControl(address, self._key)
            try:
                if path == "/release_memory_occupation":  # SGLang asserts that it is idle, and the next sync unpauses
                    control.call("/pause_generation", {"mode": "abort"}, deadline)
                control.call(path, {"tags": tags}, deadline)
            except (ServerControlError, OSError) as error:  # a TimeoutError is an OSError
                if self.supervisor.died(address):
                    log.warning("server %s died before it answered %s; it is restarted", address, path)
                    continue
                raise ServerError(f"server {address} failed in {path} of {', '.join(tags)}: {error}") from error
            released.symmetric_difference_update(tags)


class SharedGpus:
    """Moves the GPUs between servers and trainer. All ranks call the same methods; rank 0 also asks the servers.

    Args:
        engines: trained engines; a reference offloads itself after each use.
        given_up: a key of `GIVEN_UP`, for the time while servers sample.
    """

    def __init__(self, engines: Iterable[MegatronEngine], given_up: str) -> None:
        self.servers: ServersInTurn | None = None  # on rank 0, once they run
        self.servers_hold_weights = True
        self._engines = [EngineMemory(engine) for engine in engines]
        self._given_up = GIVEN_UP[given_up]
        self._phase = "training"

    def for_sampling(self) -> None:
        """Gives the GPUs to the servers, after a sync; at the start of a run, before the servers begin."""
        if self._phase == "sampling":
            return
        self._give_up(*self._given_up)
        self._ask_servers(ServersInTurn.wake)
        self._phase, self.servers_hold_weights = "sampling", True

    def for_training(self) -> None:
        """Gives the GPUs to the trainer. The servers lose their weights."""
        if self._phase == "training":
            return
        self.servers_hold_weights = False
        self._ask_servers(ServersInTurn.sleep)
        self._restore(*PARTS)
        self._phase = "training"

    def for_sync(self) -> None:
        """Brings the weights of both sides to the GPUs. The sync that follows fills the servers' weights."""
        if self._phase == "syncing":
            return
        self._give_up("gradients", "optimizer")
        self._ask_servers(ServersInTurn.wake_weights)
        self._restore("parameters")
        self._phase = "syncing"

    def _give_up(self, *parts: str) -> None:
        for engine in self._engines:
            log.info("gave up %.1f MiB for the servers", engine.offload(*parts) / 2**20)
        dist.barrier()  # no server takes memory that a rank still has

    def _restore(self, *parts: str) -> None:
        for engine in self._engines:
            engine.restore(*parts)

    def _ask_servers(self, ask: Callable[[ServersInTurn], None]) -> None:
        """Runs `ask` on rank 0, and returns on all ranks when it is done. A failure is raised on all ranks."""
        failure: ServerError | None = None
        if self.servers is not None:
            try:
                ask(self.servers)
            except ServerError as error:
                failure = error
        message = broadcast_json(str(failure) if failure else "")
        if message:
            raise failure or ServerError(message)
