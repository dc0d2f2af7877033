"""Transformer Engine's layers for the backend `te`: they accumulate gradients in float32, and recompute activations."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def accumulating(module: Any) -> Callable[..., torch.nn.Module]:
    """Returns a builder of Transformer Engine's layer `module` that adds weight gradients to `main_grad`.

    The product itself accumulates in float32, so a gradient is neither rounded to bfloat16 nor read again by DDP. Only
    these layers get Megatron's `gradient_accumulation_fusion`: its own layers need Apex for it (layers.py:1070), and
    the LM head accumulates by itself. A layer that was built with `biased=True` has a bias.
    """

    def build(*args: Any, config: Any, biased: bool = False, **options: Any) -> torch.nn.Module:
        config = copy.copy(config)
        setattr(config, "gradient_accumulation_fusion", True)  # noqa: B010 (a field that only Megatron reads)
        layer: torch.nn.Module = module(*args, config=config, **{**options, **({"bias": True} if biased else {})})
        return layer

    return build


def replicated(linear: Any) -> Callable[..., torch.nn.Module]:
    """Returns a builder of Transformer Engine's layer `linear` that every tp rank holds completely."""
    return partial(linear, parallel_mode="duplicated", skip_weight_param_allocation=False)


def accumulating_experts(experts: Any) -> Any:
    """Returns the builder of Megatron's grouped experts with linear layers that add weight gradients to `main_grad`."""
    parts = experts.keywords["submodules"]
    linears = {name: accumulating(getattr(parts, name)) for name in ("linear_fc1", "linear_fc2")}
    return partial(experts.func, submodules=dataclasses.replace(parts, **linears))


def norm_before(linear: Any, norm: Any) -> type:
    """Returns the column-parallel layer `linear` with a norm before it, whose output is recomputed in backward."""

    class NormColumnLinear(linear):
        """Column-parallel layer of a norm's output. Keeps the norm's input for backward, and not its output."""

        def __init__(self, input_size: int, *args: Any, config: Any, **options: Any) -> None:
            super().__init__(input_size, *args, config=config, **options)
            self.norm = norm(config=config, hidden_size=input_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> Any:
            return recomputing_input(self.norm, x, super().forward)

    return NormColumnLinear


class RecomputingMLP(MLP):
    """Gated MLP that recomputes SwiGLU's output in backward: a third of the activations."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
        assert per_token_scale is None, "experts are recomputed as a whole"
        gate_up, _ = self.linear_fc1(hidden_states)
        return recomputing_input(_swiglu, gate_up, self.linear_fc2)


def _swiglu(gate_up: Tensor) -> Tensor:
    output: Tensor = bias_swiglu_impl(gate_up, None)
    return output


def recomputing_input(produce: Callable[[Tensor], Tensor], x: Tensor, consume: Callable[[Tensor], Any]) -> Any:
    """Computes `consume(produce(x))`, and recomputes `produce(x)` when the backward pass of `consume` reads it.

    `produce` must keep `x` itself. Megatron's `CheckpointWithoutOutput` does the same, but compiles a C++ extension in
    every process at the first backward pass (random.py:69). FP8 layers save other tensors than their input; these are
    kept.
    """
    output = produce(x)
    if not torch.is_grad_enabled() or output.numel() == 0:
        return consume(output)
    address, numel, source = output.data_ptr(), output.numel(), x.detach()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        return saved.shape if (saved.data_ptr(), saved.numel()) == (address, numel) else saved

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return produce(source).view(kept)

    with saved_tensors_hooks(pack, unpack):
        return consume(output)
