"""Sorting of tokens by expert: each function is one kernel in forward and one in backward, as the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from transformer_engine.kernels import kernel
from transformer_engine.signatures import taken


class _Rows(torch.autograd.Function):
    """Takes rows, and probabilities by their place in `[experts * tokens]`; backward adds to them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.places, ctx.height = rows, places, x.shape[0]
        ctx.probs = None if probs is None else probs.shape
        with kernel("permute"):
            return x[rows], x.new_empty(0) if probs is None else probs.T.reshape(-1)[places]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor) -> tuple[Tensor | None, ...]:
        with kernel("unpermute"):
            x = grad.new_zeros(ctx.height, *grad.shape[1:]).index_add_(0, ctx.rows, grad)
            if ctx.probs is None:
                return x, None, None, None
            flat = grad_probs.new_zeros(ctx.probs.numel()).index_add_(0, ctx.places, grad_probs)
            return x, flat.view(*ctx.probs[::-1]).T, None, None


class _Sums(torch.autograd.Function):
    """Adds rows to the tokens that they came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, height: int) -> Tensor:
        ctx.rows = rows
        with kernel("unpermute"):
            return x.new_zeros(height, x.shape[1]).index_add_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with kernel("permute"):
            return grad[ctx.rows], None, None


def _permuted(a: SimpleNamespace, probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert, then by token; their probabilities; and the map back, which only `moe_unpermute` reads."""
    assert a.inp.dim() == 2
    assert a.inp.shape[0] == a.routing_map.shape[0], "Permute not possible"
    with kernel("make_row_id_map"):
        places = a.routing_map.bool().T.reshape(-1).nonzero().flatten()
        rows = places % max(1, a.inp.shape[0])
    assert len(places) == a.num_out_tokens, (len(places), a.num_out_tokens)
    return (*_Rows.apply(a.inp, probs, rows, places), rows)


def moe_permute(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    a = taken("permutation.moe_permute", "inp routing_map num_out_tokens", args, kwargs)
    out, _, rows = _permuted(a, None)
    return out, rows


def moe_permute_with_probs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = taken("permutation.moe_permute_with_probs", "inp probs routing_map num_out_tokens", args, kwargs)
    return _permuted(a, a.probs)


def moe_unpermute(*args: Any, **kwargs: Any) -> Tensor:
    a = taken("permutation.moe_unpermute", "inp row_id_map restore_shape", args, kwargs)
    height, width = a.restore_shape
    assert width == a.inp.shape[1]
    return _Sums.apply(a.inp, a.row_id_map, height)


def _sorted_chunks(a: SimpleNamespace, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    assert len(a.split_sizes) == len(a.sorted_index)
    assert torch.is_tensor(a.split_sizes)
    with kernel("make_chunk_sort_map"):
        chunks = torch.arange(len(a.inp)).split(a.split_sizes.tolist())
        rows = torch.cat([chunks[index] for index in a.sorted_index.tolist()])
    return _Rows.apply(a.inp, None if probs is None else probs[:, None], rows, rows)


def moe_sort_chunks_by_index(*args: Any, **kwargs: Any) -> Tensor:
    a = taken("permutation.moe_sort_chunks_by_index", "inp split_sizes sorted_index", args, kwargs)
    return _sorted_chunks(a, None)[0]


def moe_sort_chunks_by_index_with_probs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    names = "inp probs split_sizes sorted_index"
    a = taken("permutation.moe_sort_chunks_by_index_with_probs", names, args, kwargs)
    return _sorted_chunks(a, a.probs)


def moe_permute_and_pad_with_probs(*_: Any, **__: Any) -> None:
    """Only FP8 pads; Megatron imports the name."""
    raise NotImplementedError("the stand-in of Transformer Engine pads no experts")
