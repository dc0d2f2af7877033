"""Megatron's layers on `ops/row_invariant.py`, for a deterministic run: a token's log-prob has the same bits whatever
it is packed with, and the same as on a rollout server. Sizes of tensor and context parallelism are 1 there."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megarl.actor.model.packed_attention import PackedAttention
from megarl.ops import row_invariant


class _Product:
    """In place of Megatron's matrix product; its other arguments concern splits over ranks and fused gradients."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        return row_invariant.linear(input, weight, bias)


class RowInvariantColumnLinear(_Product, ColumnParallelLinear):
    """A projection into attention or an MLP."""


class RowInvariantRowLinear(_Product, RowParallelLinear):
    """A projection out of one."""


class RowInvariantAttention(PackedAttention):
    """Attention with sums over the keys in blocks of fixed length."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[2]
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
        return row_invariant.attention(query, key, value, mask[:, 0], self.softmax_scale)
