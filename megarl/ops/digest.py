"""XXH3-128 of a tensor's bytes, computed where the tensor is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from megarl.ops.native import _C, address, where

K = TypeVar("K")

LEAF_BYTES: int = _C.leaf_bytes
LEAF_DIGEST = 16  # bytes
PLACE = 16  # bytes of a leaf's place: two int64
ALIGNMENT = 16  # bytes of one read by a GPU thread


def digest(tensor: Tensor) -> str:
    """Hex XXH3-128 of a tensor's dtype, shape and leaves.

    A leaf is the XXH3-128 of 64 KiB of the tensor's bytes in row-major order, the last padded with zeros. A GPU hashes
    leaves with 8 threads each, and 16 bytes a leaf come to the host.
    """
    data = tensor.detach().contiguous()
    leaves = leaves_on_gpu(data).cpu().numpy().tobytes() if data.is_cuda else leaves_on_cpu(data)
    return xxhash.xxh3_128_hexdigest(_kind(tensor) + leaves)


class Parts:
    """Parts of a buffer, contiguous tensors that lie at `offsets` in it: their digests, by one launch on a GPU."""

    def __init__(self, offsets: Sequence[int], parts: Sequence[Tensor]) -> None:
        """`parts` give dtypes and shapes; `offsets` are in bytes."""
        self._spans = [(offset, offset + part.nbytes) for offset, part in zip(offsets, parts, strict=True)]
        self._kinds = [_kind(part) for part in parts]
        self._places: Tensor | None = None  # on the GPU: first byte of each leaf, and the end of its part

    def leaves(self, buffer: Tensor) -> Tensor:
        """Hashes all parts' leaves, uint8 `[leaves, 16]`, on the device of `buffer`, uint8 `[n]`.

        Does not wait for a GPU. Its buffer begins at a multiple of 16 bytes.
        """
        if not buffer.is_cuda:
            hashes = b"".join(leaves_on_cpu(buffer[begin:end]) for begin, end in self._spans)
            if not hashes:
                return torch.empty(0, LEAF_DIGEST, dtype=torch.uint8)
            return torch.frombuffer(bytearray(hashes), dtype=torch.uint8).view(-1, LEAF_DIGEST)
        if self._places is None:
            places = [(leaf, end) for begin, end in self._spans for leaf in range(begin, end, LEAF_BYTES)]
            on_host = torch.tensor(places).t().contiguous().pin_memory()
            self._places = on_host.to(buffer.device, non_blocking=True)
        return leaves_on_gpu(buffer, self._places)

    def digests(self, leaves: bytes) -> list[str]:
        """Digests of the parts, as `digest` gives them, from the bytes of their leaves."""
        result, at = [], 0
        for (begin, end), kind in zip(self._spans, self._kinds, strict=True):
            size = leaves_in(end - begin) * LEAF_DIGEST
            result.append(xxhash.xxh3_128_hexdigest(kind + leaves[at : at + size]))
            at += size
        return result


def digests_of(hashed: Mapping[K, tuple[Parts, Tensor]]) -> dict[K, list[str]]:
    """Digests of many buffers' parts, from the parts and the leaves of each buffer. Waits for the GPU once."""
    if not hashed:
        return {}
    hashes, result, at = torch.cat([leaves for _, leaves in hashed.values()]).cpu().numpy().tobytes(), {}, 0
    for key, (parts, leaves) in hashed.items():
        result[key] = parts.digests(hashes[at : at + leaves.nbytes])
        at += leaves.nbytes
    return result


def leaves_in(nbytes: int) -> int:
    """Leaves of a tensor of `nbytes`."""
    return -(-nbytes // LEAF_BYTES)


def buffer_bytes(leaves: int) -> int:
    """Bytes that `digests_of` has on a GPU for so many leaves: their places, their hashes, and the hashes joined."""
    return leaves * (PLACE + 2 * LEAF_DIGEST)


def leaves_on_cpu(data: Tensor) -> bytes:
    """Hashes of a contiguous tensor's leaves, 16 bytes each, by the library xxhash."""
    view = data.flatten().view(torch.uint8).numpy().data
    whole = len(view) - len(view) % LEAF_BYTES
    hashes = [xxhash.xxh3_128_digest(view[i : i + LEAF_BYTES]) for i in range(0, whole, LEAF_BYTES)]
    if whole < len(view):
        hashes.append(xxhash.xxh3_128_digest(bytes(view[whole:]).ljust(LEAF_BYTES, b"\0")))
    return b"".join(hashes)


def leaves_on_gpu(data: Tensor, places: Tensor | None = None) -> Tensor:
    """Hashes as of `leaves_on_cpu`, uint8 `[leaves, 16]`, by the kernel of `csrc/digest`.

    `places`, int64 `[2, leaves]`, are the first byte of each leaf and the end of its part; None: all of `data`.
    """
    if data.data_ptr() % ALIGNMENT:
        data = data.clone()
    size = data.numel() * data.element_size()
    count = leaves_in(size) if places is None else places.shape[1]
    leaves = torch.empty(count, LEAF_DIGEST, dtype=torch.uint8, device=data.device)
    begins, ends = (0, 0) if places is None else (address(places[0]), address(places[1]))
    _C.leaf_digests(where(data), address(data), size, begins, ends, count, address(leaves))
    return leaves


def _kind(tensor: Tensor) -> bytes:
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode()
