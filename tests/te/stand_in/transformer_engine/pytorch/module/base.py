"""Names of `transformer_engine.pytorch.module.base` that Megatron imports."""

from __future__ import annotations

import torch
from torch import Tensor


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Gradient of a weight whose true one went to `main_grad`. The real one is uninitialised memory; here it is NaN."""
    return torch.zeros(shape, dtype=dtype) if zero else torch.full(shape, torch.nan, dtype=dtype)


class TransformerEngineBaseModule(torch.nn.Module):
    """Base class that Megatron asks for by `isinstance`."""

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        self.tp_group = tp_group
