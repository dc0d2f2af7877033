"""Broadcasts batches and small values from rank 0 to all trainer ranks, as tensors and JSON, never as pickles."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.device_copies import to_device
from megarl.parallel import platform, watchdog
from megarl.types import PackedBatch

_meetings = itertools.count()
POLLS_PER_WAIT = 20  # the store is asked so often over a wait, at most every LONGEST_POLL_S
LONGEST_POLL_S = 0.1

PIECE_BYTES = 2**28  # of a tensor on the device at a time, while a batch is handed out


def is_rank0() -> bool:
    """True on rank 0, and in a process without others."""
    return not dist.is_initialized() or dist.get_rank() == 0


def await_rank0(timeout_s: float) -> None:
    """Waits on the host until rank 0 comes here too. All ranks call it; on the CPU it does nothing.

    A collective would wait on the GPU, whose kernel takes half of it from a server that shares it.

    Raises:
        TimeoutError: rank 0 did not come within `timeout_s` and the time that the monitor has to report it.
    """
    if platform.device().type == "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, key = dist.distributed_c10d._get_default_store(), f"megarl/await_rank0/{next(_meetings)}"
    if dist.get_rank() == 0:
        store.set(key, "")
        return
    began = time.monotonic()
    with watchdog.waiting("await_rank0"):
        while not store.check([key]):
            waited = time.monotonic() - began
            if waited > timeout_s + watchdog.GRACE_S:
                raise TimeoutError(f"rank 0 did not come within {timeout_s:g} s")
            time.sleep(min(max(waited / POLLS_PER_WAIT, 0.001), LONGEST_POLL_S))


def broadcast_json(value: Any = None, src: int = 0) -> Any:
    """Returns rank `src`'s `value` on every rank; it must be JSON."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    is_source = dist.get_rank() == src
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if is_source else None
    size = torch.tensor([len(text) if text is not None else 0])
    size = to_device(size, platform.device())
    dist.broadcast(size, src)
    data = torch.empty(int(size), dtype=torch.uint8) if text is None else text
    data = to_device(data, platform.device())
    dist.broadcast(data, src)
    return _loads(data if text is None else text)


def gather_json(value: Any) -> list[Any]:
    """Returns the values of all ranks in rank order, on every rank; they must be JSON.

    Two collectives and two waits for the device, for any number of ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes: list[int] = _gather(torch.tensor([len(text)])).tolist()
    texts = _gather(torch.nn.functional.pad(text, (0, max(sizes) - len(text)))).cpu()
    return [_loads(row[:size]) for row, size in zip(texts.split(max(sizes)), sizes, strict=True)]


def _gather(part: Tensor) -> Tensor:
    """All-gathers equal parts `[n]` from the host, `[ranks * n]` on the device."""
    part = to_device(part, platform.device())
    parts = part.new_empty(dist.get_world_size() * part.numel())
    dist.all_gather_into_tensor(parts, part)
    return parts


def _loads(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())


def broadcast_batch(batch: PackedBatch | None, src: int = 0) -> PackedBatch:
    """Returns rank `src`'s packed batch on every rank, bit for bit. Other ranks pass None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        assert batch is not None
        return batch

    def describe(tensors: dict[str, Tensor]) -> list[Any]:
        return [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in tensors.items()]

    header = None
    if batch is not None:
        header = [batch.cu_seqlens.numel(), describe(batch.tokens), describe(batch.sequences)]
    count, tokens, sequences = broadcast_json(header, src)

    def broadcast_tensor(source: Tensor | None, dtype: torch.dtype, shape: list[int]) -> Tensor:
        # Process groups carry neither bool nor int16: both travel as bytes.
        wire_dtype = torch.uint8 if dtype in (torch.bool, torch.int16) else dtype
        if source is None:
            tensor = torch.empty(*shape[:-1], shape[-1] * dtype.itemsize // wire_dtype.itemsize, dtype=wire_dtype)
        else:
            tensor = source.contiguous().view(wire_dtype)
        # In pieces: a batch's experts (`routing_replay`) take gigabytes, and the device is full.
        for piece in tensor.view(-1).split(PIECE_BYTES // wire_dtype.itemsize):
            device = platform.device()
            on_device = to_device(piece, device) if source is not None else torch.empty_like(piece, device=device)
            dist.broadcast(on_device, src)
            if source is None:
                piece.copy_(on_device.cpu())
        return tensor.view(dtype) if source is None else source

    cu_seqlens = broadcast_tensor(batch.cu_seqlens if batch else None, torch.int32, [count])
    received = PackedBatch(
        cu_seqlens,
        {k: broadcast_tensor(batch.tokens[k] if batch else None, getattr(torch, d), s) for k, d, s in tokens},
        {k: broadcast_tensor(batch.sequences[k] if batch else None, getattr(torch, d), s) for k, d, s in sequences},
    )
    received.shared = True
    return received
