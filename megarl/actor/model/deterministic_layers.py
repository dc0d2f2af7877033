"""Megatron's layers on `ops/row_invariant.py`, for deterministic runs.

A token's log-prob has the same bits in every packing, and the same bits as on a rollout server. Tensor and context
parallelism must be 1.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megarl.actor.model.packed_attention import PackedAttention
from megarl.ops import row_invariant


class _Product:
    """Replaces Megatron's matrix product. Ignores its other arguments, for splits over ranks and fused gradients."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        return row_invariant.linear(input, weight, bias)


class RowInvariantColumnLinear(_Product, ColumnParallelLinear):
    """Input projection of attention (QKV) or of an MLP (gate and up)."""


class RowInvariantRowLinear(_Product, RowParallelLinear):
    """Output projection of attention or of an MLP."""


class RowInvariantAttention(PackedAttention):
    """Attention that sums over keys in blocks of fixed length."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[2]
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
        return row_invariant.attention(query, key, value, mask[:, 0], self.softmax_scale)
