"""Deltas: elements whose bits differ from the last sent ones, with their index in the destination's box.

A bucket travels as a delta where that makes it smaller, else in full. For each op in order, a delta holds int32 indices
into the op's part (flattened, row-major), then the new values. Receivers overwrite. Both arrays are padded to 8 bytes,
so that any dtype may be viewed at their place. The counts (changed elements of each op) travel ahead of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INDEX = torch.int32
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def encoded_bytes(counts: Sequence[int], itemsizes: Sequence[int]) -> int:
    """Bytes of a delta with `counts[i]` changed elements in op `i`."""
    return sum(_padded(n * INDEX.itemsize) + _padded(n * size) for n, size in zip(counts, itemsizes, strict=True))


def changed(new: Tensor, old: Tensor) -> Tensor:
    """int64 indices of the elements whose bits differ; both contiguous, of one dtype. NaN equals the same NaN."""
    bits = BITS[new.dtype.itemsize]
    return (new.reshape(-1).view(bits) != old.reshape(-1).view(bits)).nonzero().flatten()


def encode(parts: Sequence[Tensor], old: Sequence[Tensor], out: Tensor) -> None:
    """Writes the changed elements into `out`, uint8.

    `out` may be the memory of `parts`: all of them are read before anything is written.
    """
    arrays = []
    for new, before in zip(parts, old, strict=True):
        index = changed(new, before)
        arrays += [index.to(INDEX), new.reshape(-1)[index]]
    at = 0
    for array in arrays:
        raw = array.view(torch.uint8)
        out[at : at + raw.numel()] = raw
        at += _padded(raw.numel())


def apply(payload: Tensor, counts: Sequence[int], targets: Sequence[Tensor]) -> None:
    """Overwrites the changed elements of `targets`, strided views of the destination's parameters."""
    at = 0
    for count, target in zip(counts, targets, strict=True):
        index = payload[at : at + count * INDEX.itemsize].view(INDEX).long()
        at += _padded(count * INDEX.itemsize)
        values = payload[at : at + count * target.dtype.itemsize].view(target.dtype)
        at += _padded(count * target.dtype.itemsize)
        if count and (int(index.min()) < 0 or int(index.max()) >= target.numel()):
            raise ValueError(f"an index of the delta lies outside a part of {target.numel()} elements")
        index, values = index.to(target.device), values.to(target.device)  # staging may be on the host
        if target.is_contiguous():
            target.view(-1)[index] = values
        else:
            target[torch.unravel_index(index, target.shape)] = values
