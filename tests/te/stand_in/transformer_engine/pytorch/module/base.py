"""Names of `transformer_engine.pytorch.module.base` that Megatron imports."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from transformer_engine.kernels import uncounted
from transformer_engine.signatures import taken


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Gradient of a weight whose true one went to `main_grad`. The real one is uninitialised memory; here it is NaN."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if zero:
        return torch.zeros(shape, dtype=dtype, device=device)
    with uncounted():
        return torch.full(shape, torch.nan, dtype=dtype, device=device)


class UserBufferQuantizationMode(Enum):
    NONE = "none"
    FP8 = "fp8"


_ub_shapes: list[tuple[int, int]] = []  # of the buffers, as in the real module one set a process


def initialize_ub(*args: Any, **kwargs: Any) -> None:
    """Remembers the buffers' shape. Nothing is moved in pieces: the layers' collectives are whole ones."""
    names = "shape tp_size quantization_modes ub_cfgs bootstrap_backend"
    a = taken("module.base.initialize_ub", names, args, kwargs)
    assert not _ub_shapes, "UB communicators are already initialized."
    assert all(isinstance(mode, UserBufferQuantizationMode) for mode in a.quantization_modes)
    assert a.ub_cfgs == {}
    assert a.bootstrap_backend in ("gloo", "mpi", "nccl")
    assert a.shape[0] % a.tp_size == 0
    _ub_shapes.append((a.shape[0], a.shape[1]))


def destroy_ub() -> None:
    _ub_shapes.clear()


def check_buffer(name: str, rows: int) -> None:
    """Refuses products before the buffers are there, or of other rows than theirs."""
    assert name in ("qkv", "proj", "fc1", "fc2"), name
    assert _ub_shapes, f"UB manager is not initialized, for {name}."
    assert rows == _ub_shapes[0][0], f"{name} has {rows} rows, and its buffer {_ub_shapes[0][0]}"


class TransformerEngineBaseModule(torch.nn.Module):
    """Base class that Megatron asks for by `isinstance`."""

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        self.tp_group = tp_group
