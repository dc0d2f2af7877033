"""XXH3-128 of a tensor's bytes, computed where the tensor is."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from megarl.ops.native import _C, address, where

LEAF_BYTES: int = _C.leaf_bytes
LEAF_DIGEST = 16  # bytes
ALIGNMENT = 16  # bytes of one read by a GPU thread


def digest(tensor: Tensor) -> str:
    """Hex XXH3-128 of a tensor's dtype, shape and leaves.

    A leaf is the XXH3-128 of 64 KiB of the tensor's bytes in row-major order, the last padded with zeros. A GPU hashes
    leaves with 8 threads each, and 16 bytes a leaf come to the host.
    """
    data = tensor.detach().contiguous()
    leaves = leaves_on_gpu(data).cpu().numpy().tobytes() if data.is_cuda else leaves_on_cpu(data)
    return xxhash.xxh3_128_hexdigest(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + leaves)


def buffer_bytes(nbytes: int) -> int:
    """Most bytes that the digest of a contiguous tensor of `nbytes` allocates on a GPU: an aligned copy, and leaves."""
    return nbytes + -(-nbytes // LEAF_BYTES) * LEAF_DIGEST


def leaves_on_cpu(data: Tensor) -> bytes:
    """Hashes of a contiguous tensor's leaves, 16 bytes each, by the library xxhash."""
    view = data.flatten().view(torch.uint8).numpy().data
    whole = len(view) - len(view) % LEAF_BYTES
    hashes = [xxhash.xxh3_128_digest(view[i : i + LEAF_BYTES]) for i in range(0, whole, LEAF_BYTES)]
    if whole < len(view):
        hashes.append(xxhash.xxh3_128_digest(bytes(view[whole:]).ljust(LEAF_BYTES, b"\0")))
    return b"".join(hashes)


def leaves_on_gpu(data: Tensor) -> Tensor:
    """Hashes as of `leaves_on_cpu`, uint8 [leaves, 16], by the kernel of `csrc/digest`."""
    if data.data_ptr() % ALIGNMENT:
        data = data.clone()
    size = data.numel() * data.element_size()
    leaves = torch.empty(-(-size // LEAF_BYTES), LEAF_DIGEST, dtype=torch.uint8, device=data.device)
    _C.leaf_digests(where(data), address(data), size, address(leaves))
    return leaves
