"""Torch's flash attention over parts of packed tokens, in plain torch on the CPU.

`register` makes it the CPU's kernel of `aten::_flash_attention_forward` and `_flash_attention_backward`, so that the
calls go through torch's own schema. It checks what the CUDA kernels check (flash_api.cpp of torch 2.14), computes in
float32 and rounds the results to the inputs' dtype. Not covered: the order of sums on a GPU, and that the kernels take
16 bits only: float32 stands for bfloat16, whose rounding hides errors.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@functools.cache
def register() -> torch.library.Library:
    """Registers both kernels in this process, once."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


def _check(query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Tensor, Tensor], longest: tuple[int, int]) -> None:
    heads, dim = query.shape[1:]
    assert dim % 8 == 0, f"head_size must be a multiple of 8, and is {dim}"
    assert dim <= 256
    assert key.shape == value.shape
    assert key.shape[2] == dim
    assert heads % key.shape[1] == 0
    assert query.dtype == key.dtype == value.dtype
    assert all(x.stride(-1) == 1 for x in (query, key, value)), "Input tensor must have contiguous last dimension"
    for cu_seqlens, rows, most in zip(bounds, (query, key), longest, strict=True):
        assert cu_seqlens.dtype == torch.int32
        assert cu_seqlens.is_contiguous()
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == len(rows)
        assert len(cu_seqlens) == len(bounds[0]) > 1
        assert bool((cu_seqlens.diff() > 0).all()), "an empty part: its log-sum-exp would be infinite"
        assert int(cu_seqlens.diff().max()) <= most
    assert longest[0] > 1 or heads == key.shape[1], "the kernel would take its path for one query a sequence"


def _parts(bounds: tuple[Tensor, Tensor]) -> list[tuple[slice, slice]]:
    queries, keys = ([slice(*pair) for pair in pairwise(x.tolist())] for x in bounds)
    return list(zip(queries, keys, strict=True))


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    """Scores float32 `[heads, queries, keys]` of query `[queries, heads, dim]` and key of as many heads."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Output `[tokens, heads, dim]`, log-sum-exp float32 `[heads, tokens]`, and what dropout would need."""
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert set(options.values()) <= {None}
    bounds, groups = (cum_seq_q, cum_seq_k), query.shape[1] // key.shape[1]
    _check(query, key, value, bounds, (max_q, max_k))
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for rows, columns in _parts(bounds):
        k, v = (x[columns].repeat_interleave(groups, dim=1).float() for x in (key, value))
        scores = _scores(query[rows], k, is_causal, scale)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, state[0], torch.empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `out` and `logsumexp` may be over more keys than these."""
    assert rng_state.dtype == unused.dtype == torch.uint64
    assert set(options.values()) <= {None}
    bounds, groups = (cum_seq_q, cum_seq_k), query.shape[1] // key.shape[1]
    _check(query, key, value, bounds, (max_q, max_k))
    assert grad_out.shape == out.shape == query.shape
    assert grad_out.dtype == out.dtype == query.dtype
    assert logsumexp.shape == (query.shape[1], len(query))
    assert logsumexp.dtype == torch.float32
    assert logsumexp.is_contiguous(), "the kernel reads it by its address"
    grads = [torch.zeros(x.shape) for x in (query, key, value)]
    for rows, columns in _parts(bounds):
        k, v = (x[columns].repeat_interleave(groups, dim=1).float() for x in (key, value))
        upstream, result = grad_out[rows].float(), out[rows].float()
        weights = (_scores(query[rows], k, is_causal, scale) - logsumexp[:, rows, None]).exp()
        of_weights = torch.einsum("qhd,khd->hqk", upstream, v) - (upstream * result).sum(-1).t()[..., None]
        of_scores = weights * of_weights * scale
        grads[0][rows] = torch.einsum("hqk,khd->qhd", of_scores, k)
        for grad, of_heads in (
            (grads[1], torch.einsum("hqk,qhd->khd", of_scores, query[rows].float())),
            (grads[2], torch.einsum("hqk,qhd->khd", weights, upstream)),
        ):
            grad[columns] = of_heads.unflatten(1, (-1, groups)).sum(2)
    dq, dk, dv = (grad.to(query.dtype) for grad in grads)
    return dq, dk, dv
