"""The full path: the trainer gathers each full tensor and hands it to every rank of every server.

Simple enough to trust, it is the oracle for exact shard-to-shard plans, and the fallback. Tensors travel in buckets of
bounded size, broadcast over gloo or as safetensors files (`transports/disk.py`). A header in the store lists a bucket's
tensors. A tensor larger than a bucket makes a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from megarl.ops.digest import digest
from megarl.reshard.plan.holdings import Box, dtype_of
from megarl.reshard.transfer.digests import VerificationError
from megarl.reshard.transfer.store import Deadline, read
from megarl.reshard.transfer.transports import disk
from megarl.reshard.transfer.transports.gloo import GlooTransport, wait

ALIGNMENT = 16  # bytes: any dtype may be viewed at a tensor's place in a bucket
JOINED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")  # projections that SGLang loads together
END = "end"
ABANDONED = "abandoned"


class BroadcastTarget(Protocol):
    """One server as the sender sees it."""

    @property
    def address(self) -> str: ...

    @property
    def broadcast_group(self) -> GlooTransport: ...

    def announce(self, header: Any) -> None:
        """Puts the next header into the store."""

    def watch(self) -> None:
        """Raises if the server has failed meanwhile."""

    def explain(self, error: Exception) -> Exception:
        """The server's own reason for `error`, or `error` itself if it gives none."""


class DeliveryError(RuntimeError):
    """Weights could not be delivered to `server`."""

    def __init__(self, server: str, cause: Exception):
        super().__init__(str(cause))
        self.server = server


@contextmanager
def delivering_to(target: BroadcastTarget) -> Iterator[None]:
    """Turns errors inside into a DeliveryError that names the server."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise DeliveryError(target.address, target.explain(error)) from error


def header_key(attempt_number: int, index: int) -> str:
    """Store key of header `index` of an attempt."""
    return f"{attempt_number}/header/{index}"


@dataclass
class FullTensorSender:
    """Sends full tensors to all `targets` at once. `add` each tensor, then `finish`.

    `boxes` lists the servers' boxes of each tensor. A digest of every box is taken before the tensor is copied into a
    bucket, so that any later corruption is seen. `dtypes` are the servers' dtypes. With a `folder` buckets become files
    there, otherwise they are broadcast.
    """

    targets: Collection[BroadcastTarget]
    bucket_bytes: int
    deadline: Deadline
    dtypes: Mapping[str, torch.dtype]
    boxes: Mapping[str, Collection[Box]]
    folder: Path | None = None
    nbytes: int = 0
    digests: dict[Box, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    _header: list[tuple[str, str, list[int]]] = field(default_factory=list)
    _filled: int = 0
    _files: int = 0

    def __post_init__(self) -> None:
        self._bucket = torch.empty(self.bucket_bytes, dtype=torch.uint8)

    def add(self, name: str, tensor: Tensor) -> None:
        """Queues one full tensor, in the checkpoint's name and shape."""
        self.names.append(name)
        if name not in self.dtypes:
            raise VerificationError(f"{name} was sent, and the server holds no such weight", name)
        tensor = tensor.detach().to("cpu", self.dtypes[name]).contiguous()
        for box in self.boxes.get(name, ()):
            self.digests[box] = digest(box.of(tensor))
        raw = tensor.flatten().view(torch.uint8)
        if self._filled + raw.numel() > self.bucket_bytes:
            self._flush()
        self._header.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        if raw.numel() > self.bucket_bytes:
            self._send(raw)
        else:
            self._bucket[self._filled : self._filled + raw.numel()] = raw
            self._filled += aligned(raw.numel())

    def finish(self) -> None:
        """Sends the queued tensors and tells the targets that nothing follows."""
        self._flush()
        self._announce(END)

    def _flush(self) -> None:
        if self._header:
            self._send(self._bucket[: min(self._filled, self.bucket_bytes)])
        self._filled = 0

    def _send(self, payload: Tensor) -> None:
        if self.folder is not None:
            path = disk.write(self.folder, self._files, dict(unpacked(payload, self._header)))
            self._announce({"bytes": payload.numel(), "file": str(path)})
            self.nbytes += payload.numel()
            self._files += 1
            self._header = []
            return
        self._announce({"bytes": payload.numel(), "tensors": self._header})
        broadcasts = []
        for target in self.targets:
            with delivering_to(target):
                broadcasts.append((target, target.broadcast_group.broadcast(payload, self.deadline)))
        for target, work in broadcasts:
            with delivering_to(target):
                wait(work, self.deadline, target.watch)
        self.nbytes += payload.numel() * len(broadcasts)
        self._header = []

    def _announce(self, header: Any) -> None:
        for target in self.targets:
            target.announce(header)


def receive_full(
    store: Store,
    group: GlooTransport | None,
    attempt_number: int,
    deadline: Deadline,
    load: Callable[[list[tuple[str, Tensor]]], Any],
) -> int:
    """Receives from a `FullTensorSender`: calls `load` with the named tensors of each bucket, mostly as views of it.

    Returns the bytes received. `group` is None where files carry the weights.
    """
    received, waiting = 0, dict[str, Tensor]()
    for index, header in enumerate(_headers(store, attempt_number, deadline)):
        received += header["bytes"]
        if "file" in header:
            load(_with_partners(disk.read(header["file"]), waiting))
            continue
        assert group is not None, "a bucket came by broadcast to a server that was to read files"
        bucket = torch.empty(header["bytes"], dtype=torch.uint8)
        try:
            wait(group.broadcast(bucket, deadline), deadline)
        except RuntimeError as error:
            raise RuntimeError(f"bucket {index} of {header['bytes']} bytes did not arrive: {error}") from error
        load(_with_partners(unpacked(bucket, header["tensors"]), waiting))
    if waiting:  # of models without the partners
        load(list(waiting.items()))
    return received


def _with_partners(tensors: Iterable[tuple[str, Tensor]], waiting: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The bucket's tensors, without those whose partner is to come: they wait for it as copies.

    SGLang joins both projections of latent attention into one (deepseek_weight_loader.py:283 of 0.5.23), and forgets
    the first one where the second does not come in the same call.
    """
    found = dict(tensors)
    for name in list(found):
        for suffix, other in (JOINED, JOINED[::-1]):
            partner = name.removesuffix(suffix) + other
            if not name.endswith(suffix) or partner in found:
                continue
            if partner in waiting:
                found[partner] = waiting.pop(partner)
            else:
                waiting[name] = found.pop(name).clone()
    return list(found.items())


def unpacked(bucket: Tensor, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the named tensors (name, dtype, shape) of a bucket, as views of it."""
    at = 0
    for name, dtype_name, shape in tensors:
        dtype = dtype_of(dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, bucket[at : at + size].view(dtype).view(tuple(shape))
        at += aligned(size)


def _headers(store: Store, attempt_number: int, deadline: Deadline) -> Iterator[dict[str, Any]]:
    index = 0
    while (header := read(store, header_key(attempt_number, index), deadline)) != END:
        if header == ABANDONED:
            raise RuntimeError("the trainer gave this push up")
        yield header
        index += 1


def aligned(size: int) -> int:
    """Rounds bytes up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
