"""Layers with norms on both sides of attention and of the MLP (Gemma 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


class SandwichLayer(TransformerLayer):
    """Layer that normalises what attention and the MLP add to the residual stream.

    Megatron adds a block's output to the stream in a function (`self_attn_bda`, `mlp_bda`). Here the norm runs before
    it. So every backend's linear layers stay as they are.
    """

    def __init__(self, *args: Any, norm: Any, **kwargs: Any) -> None:
        """Builds the layer, and two norms by `norm`."""
        super().__init__(*args, **kwargs)
        options = {"config": self.config, "hidden_size": self.config.hidden_size, "eps": self.config.layernorm_epsilon}
        self.post_attention_layernorm = norm(**options)
        self.post_mlp_layernorm = norm(**options)
        for name, normalise in (("self_attn_bda", self.post_attention_layernorm), ("mlp_bda", self.post_mlp_layernorm)):
            setattr(self, name, _after(normalise, getattr(self, name)))


def _after(norm: nn.Module, choose: Callable[..., Callable[..., Tensor]]) -> Callable[..., Callable[..., Tensor]]:
    """Wraps `choose`, Megatron's factory of the function that adds an output to the stream: `norm` comes first."""

    def chosen(*options: Any) -> Callable[..., Tensor]:
        add = choose(*options)

        def normalise_and_add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            values, bias = output
            return add((norm(values if bias is None else values + bias), None), residual, dropout)

        return normalise_and_add

    return chosen
