"""Megatron's layers on `ops/row_invariant.py`, for deterministic runs.

A token's log-prob has the same bits in every packing and layout, and the same bits as on a rollout server. Forward adds
what tensor parallelism spreads over ranks in a fixed tree; backward takes Megatron's own collectives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.actor.model.attention.packed import PackedAttention
from megarl.ops import row_invariant
from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.gather import gather_rows


class _SumInPairs(torch.autograd.Function):
    """Sum of the ranks' tensors `[tokens, ...]` in a tree; under sequence parallelism of this rank's tokens only."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup, own_tokens: bool) -> Tensor:
        ctx.group, ctx.own_tokens = group, own_tokens
        total = row_invariant.sum_over_ranks(partial, group)
        return total.chunk(group.size())[group.rank()] if own_tokens else total

    @staticmethod
    @first_derivative_only("deterministic=true", "deterministic=false")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(grad, ctx.group) if ctx.own_tokens else grad, None, None


class RowInvariantColumnLinear(ColumnParallelLinear):
    """Input projection of attention (QKV) or of an MLP (gate and up)."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **_: Any,
    ) -> Tensor:
        """Replaces Megatron's product. Its other arguments are about kernels and fused gradients."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=self.tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return row_invariant.linear(input, weight, bias)


class RowInvariantRowLinear(RowParallelLinear):
    """Output projection of attention, of an MLP or of an expert, as a sum of `summands` over all ranks.

    Experts' sums over ranks are the dispatcher's, of two ranks at most: there is one order for them.
    """

    def __init__(self, *args: Any, summands: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.summands = max(1, summands // self.tp_group.size())  # of this rank

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes the output of this rank's tokens, and the bias where the caller adds it."""
        output = row_invariant.linear_of_summands(input_, self.weight, summands=self.summands)
        if self.tp_group.size() > 1 and not self.explicit_expert_comm:
            output = _SumInPairs.apply(output, self.tp_group, self.sequence_parallel)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


class RowInvariantRouter(TopKRouter):
    """Router by a softmax. Its choice has no order, so that weights do not depend on how torch sorts."""

    def gating(self, input: Tensor) -> Tensor:
        """Computes logits `[tokens, 1, experts]`."""
        return row_invariant.linear(input, self.weight, self.bias)

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Computes weights, and True for a token's experts; both are `[tokens, experts]`."""
        logits = logits.flatten(0, -2)
        weights, ids = row_invariant.route(logits, self.topk, not self.config.moe_router_pre_softmax)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
        return torch.zeros_like(logits).scatter(1, ids, weights), chosen


class RowInvariantAttention(PackedAttention):
    """Attention that sums over keys in blocks of fixed length."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[2]
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
        return row_invariant.attention(query, key, value, mask[:, 0], self.softmax_scale)
