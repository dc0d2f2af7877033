"""The plain path: the trainer gathers each whole tensor and hands it to every rank of every server.

Simple enough to trust, it is the oracle that exact shard-to-shard plans are compared with, and the fallback. Tensors
travel in buckets of bounded size, broadcast over gloo or as safetensors files (`transports/disk.py`); a header in the
store says what a bucket holds. A tensor larger than a bucket makes a bucket of its own.
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

from megarl.reshard.plan.holdings import Box
from megarl.reshard.transfer.digests import VerificationError, digest
from megarl.reshard.transfer.store import Deadline, read
from megarl.reshard.transfer.transports import disk
from megarl.reshard.transfer.transports.gloo import GlooTransport, wait

ALIGNMENT = 16  # bytes: any dtype may be viewed at a tensor's place in a bucket
END = "end"
ABANDONED = "abandoned"


class BroadcastTarget(Protocol):
    """What the sender needs of one server."""

    @property
    def address(self) -> str: ...

    @property
    def group(self) -> GlooTransport: ...

    def announce(self, header: Any) -> None:
        """Puts the next header into the store."""

    def watch(self) -> None:
        """Raises if the server has failed meanwhile."""

    def explain(self, error: Exception) -> Exception:
        """The cause of `error` as the server tells it, or `error` itself."""


class DeliveryError(RuntimeError):
    """Weights could not be delivered to `server`."""

    def __init__(self, server: str, cause: Exception):
        super().__init__(str(cause))
        self.server = server


@contextmanager
def delivering_to(receiver: BroadcastTarget) -> Iterator[None]:
    """Names the receiver in whatever fails inside."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise DeliveryError(receiver.address, receiver.explain(error)) from error


def header_key(sequence: int, index: int) -> str:
    """Where the store holds header `index` of push `sequence`."""
    return f"{sequence}/header/{index}"


@dataclass
class FullTensorSender:
    """Sends whole tensors to all `receivers` at once. `add` each tensor, then `finish`.

    `boxes` names what the servers hold of each tensor: a digest of every box is taken before the tensor is copied
    into a bucket, so that whatever happens to it on the way is seen. `dtypes` is what the servers store. With a
    `folder` buckets become files there, otherwise they are broadcast.
    """

    receivers: Collection[BroadcastTarget]
    bucket_bytes: int
    deadline: Deadline
    dtypes: Mapping[str, torch.dtype]
    boxes: Mapping[str, Collection[Box]]
    folder: Path | None = None
    bytes: int = 0
    digests: dict[Box, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    _header: list[tuple[str, str, list[int]]] = field(default_factory=list)
    _filled: int = 0
    _files: int = 0

    def __post_init__(self) -> None:
        self._bucket = torch.empty(self.bucket_bytes, dtype=torch.uint8)

    def add(self, name: str, tensor: Tensor) -> None:
        """Queues one whole tensor, in the checkpoint's name and shape."""
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
        """Sends what is queued and tells the receivers that nothing follows."""
        self._flush()
        self._tell(END)

    def _flush(self) -> None:
        if self._header:
            self._send(self._bucket[: min(self._filled, self.bucket_bytes)])
        self._filled = 0

    def _send(self, payload: Tensor) -> None:
        if self.folder is not None:
            path = disk.write(self.folder, self._files, dict(unpacked(payload, self._header)))
            self._tell({"bytes": payload.numel(), "file": str(path)})
            self.bytes += payload.numel()
            self._files += 1
            self._header = []
            return
        self._tell({"bytes": payload.numel(), "tensors": self._header})
        works = []
        for receiver in self.receivers:
            with delivering_to(receiver):
                works.append((receiver, receiver.group.broadcast(payload, self.deadline)))
        for receiver, work in works:
            with delivering_to(receiver):
                wait(work, self.deadline, receiver.watch)
        self.bytes += payload.numel() * len(works)
        self._header = []

    def _tell(self, header: Any) -> None:
        for receiver in self.receivers:
            receiver.announce(header)


def receive_full(
    store: Store,
    group: GlooTransport | None,
    sequence: int,
    deadline: Deadline,
    load: Callable[[list[tuple[str, Tensor]]], Any],
) -> int:
    """The other end of `FullTensorSender`: calls `load` with the named tensors of each bucket. They are views of it.

    Returns the bytes received. `group` is None where files carry the weights.
    """
    received = 0
    for index, header in enumerate(_headers(store, sequence, deadline)):
        received += header["bytes"]
        if "file" in header:
            load(disk.read(header["file"]))
            continue
        assert group is not None, "a bucket came by broadcast to a server that was to read files"
        bucket = torch.empty(header["bytes"], dtype=torch.uint8)
        try:
            wait(group.broadcast(bucket, deadline), deadline)
        except RuntimeError as error:
            raise RuntimeError(f"bucket {index} of {header['bytes']} bytes did not arrive: {error}") from error
        load(list(unpacked(bucket, header["tensors"])))
    return received


def unpacked(bucket: Tensor, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors (name, dtype, shape) that lie in a bucket, as views of it."""
    at = 0
    for name, dtype_name, shape in tensors:
        dtype = dtype_of(dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, bucket[at : at + size].view(dtype).view(tuple(shape))
        at += aligned(size)


def _headers(store: Store, sequence: int, deadline: Deadline) -> Iterator[dict[str, Any]]:
    index = 0
    while (header := read(store, header_key(sequence, index), deadline)) != END:
        if header == ABANDONED:
            raise RuntimeError("the trainer gave this push up")
        yield header
        index += 1


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`, such as "float32". Raises ValueError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype
