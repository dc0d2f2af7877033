"""Operations that Megatron uses one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_engine.signatures import taken


class SwiGLU(torch.nn.Module):
    """`silu(gate) * up` of `[..., gate and up]`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        taken("ops.SwiGLU.__init__", "", args, kwargs)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
