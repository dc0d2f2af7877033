"""NCCL's rules for torch.distributed, enforced over gloo in the ranks of a test. `install()` comes before the world.

Covers, as `ProcessGroupNCCL` without `device_id` behaves:

- The first collective or batch of sends and receives of a group builds the group's communicator, and the host waits
  until all ranks of the group build it. An un-batched send or receive builds one for its pair of ranks.
- The operations of a communicator run in the order of issue. A send ends when its receive has run. The
  operations of a batch run together; two sends of it to one rank meet that rank's receives in order.
- Both ends of an operation must agree on its kind and size, and the ranks of a group must have different devices.
- An operation that has not ended after the group's `options._timeout` ends the process (see `communicator.Watchdog`),
  counted from its start. So that a test ends, `limit_s` bounds it, and building, which has no limit in NCCL.
- A receive from any source is refused.

Does not cover:

- CUDA streams. `wait` stops the host, where NCCL lets it go on and issue more; so a program that needs the host to run
  ahead hangs here alone. Races of kernels with communication, and device tensors that must not be CPU tensors, are not
  seen.
- NCCL's buffers, which hold megabytes on some connections. A program that relies on them hangs here.
- Kernels of several communicators that wait for room on the GPU, and `CUDA_DEVICE_MAX_CONNECTIONS`.
- Two operations of equal kind and size in swapped order: they exchange wrong data, as on a GPU.
- NCCL's arithmetic: sums are gloo's. Network errors, eager initialisation (`device_id`), splitting, CUDA graphs.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from megarl.parallel import megatron_patches
from tests.nccl_semantics.communicator import Communicator, NcclError, Watchdog, Work

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "alltoall"),
    *("all_gather_single", "all_gather_single_coalesced", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "all_to_all_single", "gather", "scatter", "barrier"),
)
SAME_SIZE = ("allreduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single")  # on every rank
megatron_patches._gather_apart()  # gloo carries here, too
GLOO = {name: getattr(dist.ProcessGroup, name) for name in (*COLLECTIVES, "send", "recv")}
BUILD_TAG, PAIR_TAG, BATCH_TAG = 101, 103, 105  # and the next one, for headers
DTYPES = [str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]


def device_number() -> int:
    """This rank's GPU: one number for each machine and `LOCAL_RANK`."""
    return zlib.crc32(f"{socket.gethostname()} {os.environ.get('LOCAL_RANK', '0')}".encode())


def header_of(tensor: Tensor) -> Tensor:
    return torch.tensor([tensor.numel(), DTYPES.index(str(tensor.dtype))])


def described(header: Sequence[int]) -> str:
    return f"{header[0]} x {DTYPES[header[1]]}"


class Emulation:
    """The communicators of this process, by group and by pair."""

    def __init__(self, watchdog: Watchdog, limit_s: float, device: int) -> None:
        self.watchdog, self.limit_s, self.device = watchdog, limit_s, device
        self.communicators: dict[tuple[str, int | None], Communicator] = {}
        self.timeouts: dict[str, float] = {}

    def communicator(self, group: dist.ProcessGroup, peer: int | None = None) -> Communicator:
        """The communicator of a group, or of this rank and its `peer` there, built at first use."""
        key = (group.group_name, peer)
        if key not in self.communicators:
            ranks = dist.get_process_group_ranks(group)
            members = list(range(len(ranks))) if peer is None else sorted({group.rank(), peer})
            listing = ", ".join(str(ranks[member]) for member in members)
            name = f"{'group' if peer is None else 'pair of group'} {group.group_desc} (ranks {listing})"
            timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
            limit_s = self.timeouts.setdefault(group.group_name, min(timeout.total_seconds(), self.limit_s))
            _set_pg_timeout(timedelta(days=1), group)  # gloo's own would raise instead
            with self.watchdog.watching(f"building the communicator of {name}", self.limit_s):
                devices = self._meet(group, peer)
            if len(set(devices)) < len(devices):
                raise NcclError(f"duplicate GPU in {name}: devices {devices}")
            self.communicators[key] = Communicator(name, limit_s, self.watchdog)
        return self.communicators[key]

    def _meet(self, group: dist.ProcessGroup, peer: int | None) -> list[int]:
        """Waits for all ranks of the communicator and returns their devices."""
        own = torch.tensor([self.device])
        if peer is None:
            devices = [torch.empty_like(own) for _ in range(group.size())]
            GLOO["allgather"](group, [devices], [own]).wait()
            return [int(device) for device in devices]
        if peer == group.rank():
            return [self.device]
        other = torch.empty_like(own)
        works = [GLOO["send"](group, [own], peer, BUILD_TAG), GLOO["recv"](group, [other], peer, BUILD_TAG)]
        for work in works:
            work.wait()
        return [self.device, int(other)]

    def collective(self, method: str) -> Callable[..., Work]:
        """The method of `ProcessGroup` under NCCL's rules."""

        def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Work:
            communicator = self.communicator(group)
            header = torch.tensor([COLLECTIVES.index(method), *_sizes(method, args)])
            label = f"{method} {described(header[1:].tolist())}" if method in SAME_SIZE else method

            def run() -> None:
                headers = [torch.empty_like(header) for _ in range(group.size())]
                GLOO["allgather"](group, [headers], [header]).wait()
                for rank, other in enumerate(headers):
                    if not torch.equal(other, header):
                        operation = COLLECTIVES[int(other[0])]
                        sizes = described(other[1:].tolist()) if operation in SAME_SIZE else ""
                        raise NcclError(f"rank {rank} of the group has {operation} {sizes} in its place")
                GLOO[method](group, *args, **kwargs).wait()

            return communicator.submit(label, run)

        return issue

    def one_by_one(self, method: str) -> Callable[..., Work]:
        """`send` or `recv` of `ProcessGroup`, on the communicator of the pair."""

        def issue(group: dist.ProcessGroup, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
            operations = [(method, tensors[0], peer)]
            communicator = self.communicator(group, peer)
            return communicator.submit(_listing(operations), lambda: exchange(group, operations, PAIR_TAG))

        return issue

    def batch(self, ops: list[dist.P2POp]) -> list[Work]:
        """`batch_isend_irecv`, on the communicator of the group."""
        names = {dist.isend: "send", dist.irecv: "recv"}
        operations = [(names[op.op], op.tensor, op.group_peer) for op in ops]
        group = ops[0].group
        work = self.communicator(group).submit(
            f"batch of {_listing(operations)}", lambda: exchange(group, operations, BATCH_TAG)
        )
        return [work]

    def forget_closed_groups(self) -> None:
        for key in [key for key in self.communicators if key[0] not in _world.pg_names.values()]:
            self.communicators.pop(key).close()
            self.timeouts.pop(key[0], None)


def exchange(group: dist.ProcessGroup, operations: list[tuple[str, Tensor, int]], tag: int) -> None:
    """Runs sends and receives together. Only the ones of one direction with one rank follow each other."""
    directions: dict[tuple[str, int], list[Tensor]] = {}
    for method, tensor, peer in operations:
        directions.setdefault((method, peer), []).append(tensor)
    outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run(method: str, peer: int, tensors: list[Tensor]) -> None:
        try:
            for tensor in tensors:
                _one_way(group, method, tensor, peer, tag)
        except Exception as error:
            outcomes.put(error)
        else:
            outcomes.put(None)

    *others, last = directions.items()
    for (method, peer), tensors in others:
        threading.Thread(target=run, args=(method, peer, tensors), daemon=True).start()
    run(*last[0], last[1])
    for _ in directions:
        if error := outcomes.get():
            raise error


def _one_way(group: dist.ProcessGroup, method: str, tensor: Tensor, peer: int, tag: int) -> None:
    """Sends or receives a header, on which both ranks must agree, and then the tensor."""
    expected = header_of(tensor)
    header = expected.clone()
    GLOO[method](group, [header], peer, tag + 1).wait()
    if not torch.equal(header, expected):
        raise NcclError(
            f"it receives {described(expected.tolist())} from rank {peer} of the group, "
            f"which sends {described(header.tolist())}"
        )
    GLOO[method](group, [tensor], peer, tag).wait()


def _sizes(method: str, args: Sequence[Any]) -> tuple[int, int]:
    """Elements and dtype of a collective's first tensor, if all ranks must have the same."""
    if method not in SAME_SIZE:
        return 0, 0
    tensor = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    return tensor.numel(), DTYPES.index(str(tensor.dtype))


def _listing(operations: list[tuple[str, Tensor, int]]) -> str:
    ends = {"send": "to", "recv": "from"}
    return ", ".join(
        f"{method} {described(header_of(tensor).tolist())} {ends[method]} {peer}" for method, tensor, peer in operations
    )


def install(reports: Path, limit_s: float = 240.0, device: int | None = None) -> Emulation:
    """Puts NCCL's rules in force in this rank. A world that is joined with the backend "nccl" runs on gloo."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    emulation = Emulation(Watchdog(rank, world, reports), limit_s, device_number() if device is None else device)
    for method in COLLECTIVES:
        setattr(dist.ProcessGroup, method, emulation.collective(method))
    for method in ("send", "recv"):
        setattr(dist.ProcessGroup, method, emulation.one_by_one(method))

    def from_any_source(*_: Any) -> None:
        raise NcclError("NCCL has no receive from any source")

    join, leave = dist.init_process_group, dist.destroy_process_group

    def init_process_group(backend: str, **options: Any) -> None:
        assert backend == "nccl", f"the rank joins a world of {backend}, not of nccl"
        join("gloo", **options)

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        leave(group)
        emulation.forget_closed_groups()

    for name, replacement in {
        "batch_isend_irecv": emulation.batch,
        "init_process_group": init_process_group,
        "destroy_process_group": destroy_process_group,
    }.items():
        setattr(dist, name, replacement)
    setattr(dist.ProcessGroup, "recv_anysource", from_any_source)  # noqa: B010
    return emulation
