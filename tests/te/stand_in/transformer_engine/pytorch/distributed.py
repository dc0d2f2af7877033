"""Collectives of the stand-in's layers, and what Megatron imports from here."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast


def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Any:
    """Only FP8 needs to know that activations are computed again."""
    return contextlib.nullcontext()


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Recomputes `function` in backward, under the FP8 recipe of its forward pass."""
    assert not kwargs.pop("distribute_saved_activations", False)
    inputs = {k: v for k, v in kwargs.items() if k not in ("get_rng_state_tracker", "tp_group")}
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    contexts = (contextlib.nullcontext(), fp8_autocast(recipe is not None, recipe))
    options = {"use_reentrant": False, "context_fn": lambda: contexts}
    return torch.utils.checkpoint.checkpoint(function, *args, **options, **inputs)


class CudaRNGStatesTracker:
    """Base class of Megatron's tracker, which the stand-in's layers do not use."""

    def __init__(self) -> None:
        raise NotImplementedError("the stand-in of Transformer Engine has no tracker of random states")


def _nothing(x: Tensor, group: Any) -> Tensor:
    return x


def _all_gather(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, group=group)
    return out


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    assert x.shape[0] % group.size() == 0, f"{x.shape[0]} rows cannot be scattered over {group.size()} ranks"
    return _all_reduce(x, group).chunk(group.size())[group.rank()].contiguous()


OPERATIONS = {f.__name__[1:]: f for f in (_nothing, _all_gather, _all_reduce, _reduce_scatter)}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: str, back: str) -> Tensor:
        ctx.group, ctx.back = group, back
        return OPERATIONS[there](x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return OPERATIONS[ctx.back](grad, ctx.group), None, None, None


def exchange(x: Tensor, group: Any, there: str, back: str) -> Tensor:
    """Runs the collective `there` on rows in forward, and `back` on the gradient's rows in backward."""
    return x if group is None or group.size() == 1 else _Exchange.apply(x, group, there, back)
