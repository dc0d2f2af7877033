"""Causal attention over packed sequences on CPU, in float32, with its gradient.

Sequences are not padded. Tokens that sequences share, such as the prompt of a group, are read in place, without a copy
per sequence. Backward computes the weights again (as in arXiv:2205.14135), a block of queries at a time.
`megarl.cpu.torch_twins` has the plain-torch twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.native import _C, CPU, check_cu_seqlens, check_on_cpu


@dataclass(frozen=True)
class Sequences:
    """Sequences of tokens for packed attention. Sequences can share a prompt.

    Sequence s has the tokens `rows[cu_seqlens[s] : cu_seqlens[s + 1]]`, in order. Its first `skipped[s]` tokens act
    only as keys. They are a shared prompt, whose queries belong to another sequence. Every token is a query exactly
    once.

    Raises:
        ValueError: a dtype or shape does not fit, `cu_seqlens` does not rise from 0, or a token is not a query exactly
            once.
    """

    cu_seqlens: Tensor  # int32 [num_seqs + 1]
    rows: Tensor  # int64 [cu_seqlens[-1]], indices of tokens
    skipped: Tensor  # int64 [num_seqs], tokens at the start without queries

    def __post_init__(self) -> None:
        check_on_cpu("rows", self.rows, (self.rows.numel(),), torch.int64)
        check_cu_seqlens(self.cu_seqlens, self.rows.numel(), CPU)
        lengths = self.cu_seqlens.diff().long()
        check_on_cpu("skipped", self.skipped, (lengths.numel(),), torch.int64)
        if bool(((self.skipped < 0) | (self.skipped > lengths)).any()):
            raise ValueError(f"skipped {self.skipped.tolist()[:8]}... must be between 0 and the sequences' lengths")
        first_query = (self.cu_seqlens[:-1] + self.skipped).repeat_interleave(lengths)
        queries = self.rows[torch.arange(self.rows.numel()) >= first_query]
        outside = (self.rows < 0) | (self.rows >= self.tokens)
        if bool(outside.any()) or not torch.equal(queries.sort().values, torch.arange(self.tokens)):
            raise ValueError(
                f"the sequences' {self.tokens} queries are not the tokens 0 to {self.tokens - 1}, each once"
            )

    @property
    def tokens(self) -> int:
        return self.rows.numel() - int(self.skipped.sum())


def packed_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> Tensor:
    """Computes each token's causal softmax attention in its sequence, `[tokens, heads, dim]`. Differentiable.

    Args:
        query: float32 `[tokens, heads, dim]` on the CPU.
        key, value: float32 `[tokens, kv_heads, dim]`; `heads / kv_heads` consecutive heads share one.
        sequences: the tokens of each sequence.
        scale: factor of the scores before the softmax.

    Raises:
        ValueError: a dtype, shape or device does not fit.
    """
    return _PackedAttention.apply(query, key, value, sequences, scale)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))
        (_, heads, dim), kv_heads, tokens = query.shape, key.shape[1], sequences.tokens
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"queries have {heads} heads, keys {kv_heads}: heads must be a multiple of the keys' heads"
            )
        check_on_cpu("query", query, (tokens, heads, dim))
        check_on_cpu("key", key, (tokens, kv_heads, dim))
        check_on_cpu("value", value, (tokens, kv_heads, dim))
        out, log_sums = torch.empty_like(query), query.new_empty(tokens, heads)
        _C.packed_attention(
            torch.get_num_threads(),
            _shape(query, key, value, sequences, scale),
            *(out.data_ptr(), log_sums.data_ptr()),
        )
        ctx.save_for_backward(query, key, value, log_sums)
        ctx.sequences, ctx.scale = sequences, scale
        return out

    @staticmethod
    @first_derivative_only("packed_attention", "megarl.cpu.torch_twins.packed_attention")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        check_on_cpu("grad", grad, tuple(query.shape))
        rows = ctx.sequences.rows
        grad_query = torch.empty_like(query)
        grad_keys, grad_values = (key.new_empty(rows.numel(), *key.shape[1:]) for _ in range(2))
        _C.packed_attention_backward(
            torch.get_num_threads(),
            _shape(query, key, value, ctx.sequences, ctx.scale),
            *(log_sums.data_ptr(), grad.data_ptr()),
            *(grad_query.data_ptr(), grad_keys.data_ptr(), grad_values.data_ptr()),
        )
        grad_key, grad_value = (torch.zeros_like(key).index_add_(0, rows, x) for x in (grad_keys, grad_values))
        return grad_query, grad_key, grad_value, None, None


def _shape(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> _C.PackedAttentionShape:
    return _C.PackedAttentionShape(
        *(sequences.skipped.numel(), query.shape[1], key.shape[1], query.shape[2]),
        *(sequences.cu_seqlens.data_ptr(), sequences.rows.data_ptr(), sequences.skipped.data_ptr()),
        *(scale, query.data_ptr(), key.data_ptr(), value.data_ptr()),
    )
