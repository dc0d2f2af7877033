"""Layer backends: a model's modules, sequence packing and log-probs. Chosen once per engine.

    torch          Megatron's own layers, with attention over packed sequences in plain torch; runs everywhere
    te             Transformer Engine's modules, under the same parameter names; needs a GPU
    cpu            float32 kernels of `megarl/cpu`, for machines without a GPU
    deterministic  row-invariant layers: results do not depend on the batch and equal the rollout server's bits

To add a backend, write a function here that returns a `LayerBackend`. Add its name to `BACKENDS` of `actor/config.py`
and to `backend_of`. No other file of the actor imports `megarl/cpu`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.batch.context_parallel import Cut, LocalTokens
from megarl.actor.config import EngineConfig, backend_of
from megarl.actor.model import heads
from megarl.actor.model.deterministic_layers import (
    RowInvariantAttention,
    RowInvariantColumnLinear,
    RowInvariantRowLinear,
)
from megarl.actor.model.norms import RMSNorm
from megarl.actor.model.packed_attention import PackedAttention, PackedRotary, pack_in_blocks, pack_with_bounds
from megarl.families import rotary_inv_freq
from megarl.ops import row_invariant
from megarl.parallel import platform

Pack = Callable[[Tensor, torch.device, Cut, LocalTokens | None], PackedSeqParams]


class BiasedRowParallelLinear(RowParallelLinear):
    """Attention's output projection with a bias. Megatron's `add_bias_linear` would also add biases to the MLP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


class BiasedRowInvariantLinear(BiasedRowParallelLinear, RowInvariantRowLinear):
    """Row-invariant output projection of attention with a bias, for deterministic runs."""


@dataclass(frozen=True)
class LayerBackend:
    """Modules and functions of a model that depend on the layer implementation.

    `pack` builds the attention's parameters from padded `cu_seqlens` (int32 `[num_seqs + 1]`, on the host), the cut
    over ranks, and the tokens read under shared prompts. `rotary` takes the frequencies `[rotary dim / 2]`. Module
    classes that are None keep Megatron's own. `logprobs` has the signature of `heads.logprobs`.
    """

    name: str
    pack: Pack
    rotary: Callable[[Tensor], torch.nn.Module] = PackedRotary
    norm: Any = RMSNorm
    qk_norm: Any = RMSNorm
    attention: Any = PackedAttention
    column_linear: Any = None
    row_linear: Any = None
    biased_row_linear: Any = BiasedRowParallelLinear
    gated_activation: Any = None
    config_fields: dict[str, Any] = field(default_factory=dict)  # fields of Megatron's TransformerConfig
    logprobs: Callable[..., tuple[Tensor, Tensor | None]] = heads.logprobs
    one_thread: bool = False  # True: run on one thread, because results depend on the number of threads

    def place_modules(self, spec: Any, *, qk_norm: bool, sparse: bool, output_bias: bool) -> None:
        """Puts the backend's modules into Megatron's local spec of one layer, in place.

        `sparse` layers have experts, whose linear layers stay Megatron's own.
        """
        parts, attention = spec.submodules, spec.submodules.self_attention.submodules
        mlp = parts.mlp.submodules.experts.submodules if sparse else parts.mlp.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = self.norm
        if qk_norm:
            attention.q_layernorm = attention.k_layernorm = self.qk_norm
        attention.core_attention = self.attention
        if self.gated_activation is not None:
            mlp.activation_func = self.gated_activation
        if self.column_linear is not None:
            attention.linear_qkv, attention.linear_proj = self.column_linear, self.row_linear
            if not sparse:
                mlp.linear_fc1, mlp.linear_fc2 = self.column_linear, self.row_linear
        if output_bias:
            attention.linear_proj = self.biased_row_linear


def choose_backend(config: EngineConfig, model: PretrainedConfig, deterministic: bool) -> LayerBackend:
    """Builds an engine's backend on this machine, by `actor.backend` and the run's `deterministic`."""
    has_gpu, has_te = platform.has_gpu(), platform.has_transformer_engine()
    name = backend_of(config, has_gpu=has_gpu, has_te=has_te, deterministic=deterministic)
    if name == "te":
        return _transformer_engine()
    if name == "cpu":
        return _cpu(rotary_inv_freq(model))
    return _deterministic() if name == "deterministic" else _torch()


def _torch() -> LayerBackend:
    return LayerBackend("torch", pack_in_blocks, config_fields={"activation_func": F.silu})


def _deterministic() -> LayerBackend:
    return LayerBackend(
        "deterministic",
        pack_in_blocks,
        attention=RowInvariantAttention,
        column_linear=RowInvariantColumnLinear,
        row_linear=RowInvariantRowLinear,
        biased_row_linear=BiasedRowInvariantLinear,
        config_fields={"activation_func": row_invariant.silu},
        logprobs=heads.row_invariant_logprobs,
        one_thread=True,
    )


def _transformer_engine() -> LayerBackend:
    """Builds the backend of Transformer Engine's modules.

    Norms are not fused into the following linear layers, so parameters have the names of the torch layers.
    """
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # imports the package

    provider = TESpecProvider()
    return LayerBackend(
        "te",
        pack_with_bounds,
        norm=provider.layer_norm(rms_norm=True),
        qk_norm=provider.layer_norm(rms_norm=True, for_qk=True),
        attention=provider.core_attention(),
        column_linear=provider.column_parallel_linear(),
        row_linear=provider.row_parallel_linear(),
        config_fields={"activation_func": F.silu},
    )


def _cpu(inv_freq: Tensor) -> LayerBackend:
    """Builds the backend of `megarl/cpu`. Its layers fall back to the torch layers for sequences cut over ranks."""
    from megarl.cpu import layers

    plain = _torch()
    norm = layers.fused_rms_norm(RMSNorm)
    return dataclasses.replace(
        plain,
        name="cpu",
        pack=layers.packing(plain.pack, inv_freq),
        rotary=layers.NoRotary,
        norm=norm,
        qk_norm=norm,
        attention=layers.fused_attention(PackedAttention),
        gated_activation=layers.FusedSwiGLU,
        # With this field, Megatron passes gate and up as one tensor to the spec's activation module.
        config_fields={"activation_func": F.silu, "use_te_activation_func": True},
    )
