"""Broadcasts batches and small values from rank 0 to all trainer ranks, as tensors and JSON, never as pickles."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel import platform
from megarl.types import PackedBatch


def broadcast_json(value: Any = None, src: int = 0) -> Any:
    """Returns rank `src`'s `value` on every rank; it must be JSON."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    is_source = dist.get_rank() == src
    text = json.dumps(value).encode() if is_source else b""
    size = torch.tensor([len(text)], device=platform.device())
    dist.broadcast(size, src)
    data = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8) if is_source else torch.empty(int(size), dtype=torch.uint8)
    )
    data = data.to(platform.device())
    dist.broadcast(data, src)
    return json.loads(bytes(data.cpu().tolist()))


def gather_json(value: Any) -> list[Any]:
    """Returns the values of all ranks in rank order, on every rank; they must be JSON."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    return [broadcast_json(value, src) for src in range(dist.get_world_size())]


def broadcast_batch(batch: PackedBatch | None) -> PackedBatch:
    """Returns rank 0's packed batch on every rank, bit for bit. Other ranks pass None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert batch is not None
        return batch

    def describe(tensors: dict[str, Tensor]) -> list[Any]:
        return [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in tensors.items()]

    header = None
    if batch is not None:
        header = [batch.cu_seqlens.numel(), describe(batch.tokens), describe(batch.sequences)]
    count, tokens, sequences = broadcast_json(header)

    def broadcast_tensor(source: Tensor | None, dtype: torch.dtype, shape: list[int]) -> Tensor:
        wire_dtype = torch.uint8 if dtype == torch.bool else dtype
        tensor = torch.empty(shape, dtype=wire_dtype) if source is None else source.contiguous().view(wire_dtype)
        on_device = tensor.to(platform.device())
        dist.broadcast(on_device, 0)
        return on_device.cpu().view(dtype)

    cu_seqlens = broadcast_tensor(batch.cu_seqlens if batch else None, torch.int32, [count])
    return PackedBatch(
        cu_seqlens,
        {k: broadcast_tensor(batch.tokens[k] if batch else None, getattr(torch, d), s) for k, d, s in tokens},
        {k: broadcast_tensor(batch.sequences[k] if batch else None, getattr(torch, d), s) for k, d, s in sequences},
    )
