"""Sends batches and small facts from rank 0 to all trainer ranks: tensors and JSON, never pickled objects."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel import platform
from megarl.types import PackedBatch


def broadcast_json(value: Any = None, src: int = 0) -> Any:
    """`value` of rank `src` on every rank; it must be JSON."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    mine = dist.get_rank() == src
    text = json.dumps(value).encode() if mine else b""
    size = torch.tensor([len(text)], device=platform.device())
    dist.broadcast(size, src)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if mine else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(platform.device())
    dist.broadcast(data, src)
    return json.loads(bytes(data.cpu().tolist()))


def gather_json(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank; values must be JSON."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    return [broadcast_json(value, src) for src in range(dist.get_world_size())]


def broadcast_batch(batch: PackedBatch | None, src: int = 0) -> PackedBatch:
    """The packed batch of rank `src` on every rank, bit for bit. Other ranks pass None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert batch is not None
        return batch

    def describe(tensors: dict[str, Tensor]) -> list[Any]:
        return [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in tensors.items()]

    header = None
    if batch is not None:
        header = [batch.cu_seqlens.numel(), describe(batch.tokens), describe(batch.sequences)]
    count, tokens, sequences = broadcast_json(header, src)

    def receive(mine: Tensor | None, dtype: torch.dtype, shape: list[int]) -> Tensor:
        wire = torch.uint8 if dtype == torch.bool else dtype
        tensor = torch.empty(shape, dtype=wire) if mine is None else mine.contiguous().view(wire)
        on_device = tensor.to(platform.device())
        dist.broadcast(on_device, src)
        return on_device.cpu().view(dtype)

    cu_seqlens = receive(batch.cu_seqlens if batch else None, torch.int32, [count])
    return PackedBatch(
        cu_seqlens,
        {k: receive(batch.tokens[k] if batch else None, getattr(torch, d), s) for k, d, s in tokens},
        {k: receive(batch.sequences[k] if batch else None, getattr(torch, d), s) for k, d, s in sequences},
    )
