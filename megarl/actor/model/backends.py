"""Layer backends: a model's modules, sequence packing and log-probs. Chosen once per engine.

    torch          Megatron's own layers, with attention over packed sequences in plain torch; runs everywhere
    te             Transformer Engine's fused modules; needs a GPU
    cpu            float32 kernels of `megarl/cpu`, for machines without a GPU
    deterministic  row-invariant layers: results do not depend on the batch and equal the rollout server's bits

To add a backend, write a function here that returns a `LayerBackend`. Add its name to `BACKENDS` of `actor/config.py`
and to `backend_of`. No other file of the actor imports `megarl/cpu`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import ExpertsBuilder, MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.batch.context_parallel import Cut, LocalTokens
from megarl.actor.batch.shared_prefix import Share, share, share_in_segments
from megarl.actor.config import EngineConfig, backend_of, groups_experts
from megarl.actor.gpu import fp8
from megarl.actor.model import fused_layers, heads
from megarl.actor.model.attention import delta_net
from megarl.actor.model.attention.delta_net import PackedDeltaNet
from megarl.actor.model.attention.latent import LatentParts, LatentSelfAttention, ReplicatedLinear
from megarl.actor.model.attention.packed import (
    OwnRotaryAttention,
    PackedAttention,
    PackedRotary,
    RotaryTable,
    pack_in_blocks,
)
from megarl.actor.model.attention.prefix import pack_segments, with_shared_prompts
from megarl.actor.model.attention.windows_and_sinks import in_transformer_engine
from megarl.actor.model.deterministic_layers import (
    RowInvariantAttention,
    RowInvariantColumnLinear,
    RowInvariantRouter,
    RowInvariantRowLinear,
)
from megarl.actor.model.moe import FrozenBiasRouter, FusedRouter, grouped_experts
from megarl.actor.model.norms import RMSNorm
from megarl.actor.model.sandwich import SandwichLayer
from megarl.families import decoder, rotary_inv_freq
from megarl.families.blocks import Attention, DeltaNet, Experts, LatentAttention, Layer, Mlp
from megarl.families.rotary import rope_parameters
from megarl.ops import row_invariant
from megarl.parallel import determinism, megatron_patches, platform
from megarl.parallel.determinism import Determinism

Pack = Callable[[Tensor, torch.device, Cut, LocalTokens | None], PackedSeqParams]


class BiasedRowParallelLinear(RowParallelLinear):
    """Attention's output projection with a bias. Megatron's `add_bias_linear` would also add biases to the MLP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


class GatedSelfAttention(SelfAttention):
    """Attention whose output is scaled by a sigmoid. Megatron's own function of this name would be compiled."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * torch.sigmoid(gate.float().reshape(x.shape))).to(x.dtype)


class ExpertRowLinear(RowParallelLinear):
    """Output projection of an expert, whose bias Megatron adds in place (mlp.py:354).

    Autograd forbids this on the view that a reduction over a single rank returns, so the output is copied.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the product and the bias, if there is one."""
        output, bias = super().forward(input_)
        return output if bias is None else output.clone(), bias


class BiasedRowInvariantLinear(BiasedRowParallelLinear, RowInvariantRowLinear):
    """Row-invariant output projection of attention with a bias, for deterministic runs."""


PLAIN_LINEAR: dict[str, Any] = {
    "column_linear": ColumnParallelLinear,
    "row_linear": RowParallelLinear,
    "biased_row_linear": BiasedRowParallelLinear,
    "replicated_linear": ReplicatedLinear,
}


@dataclass(frozen=True)
class LayerBackend:
    """Modules and functions of a model that depend on the layer implementation.

    `pack` builds the attention's parameters from padded `cu_seqlens` (int32 `[num_seqs + 1]`, on the host), the cut
    over ranks, and the tokens that `share` selects under shared prompts. `rotary` takes the frequencies
    `[rotary dim / 2]`.
    `gated_activation` None uses Megatron's `activation_func`. `logprobs` has the signature of `heads.logprobs`.
    """

    name: str
    pack: Pack
    share: Share = share
    rotary: Callable[[Tensor], torch.nn.Module] = PackedRotary
    norm: Any = RMSNorm
    qk_norm: Any = RMSNorm
    attention: Any = PackedAttention
    windowed_attention: Any = PackedAttention  # takes `window` and `sinks`
    tables: int = 1  # of rotary frequencies, of which a layer takes one
    column_linear: Any = ColumnParallelLinear
    replicated_linear: Any = ReplicatedLinear  # complete on every tp rank, which sees its own tokens
    norm_linear: Any = None  # a norm and the column-parallel layer behind it, in one module; None: two modules
    row_linear: Any = RowParallelLinear
    biased_row_linear: Any = BiasedRowParallelLinear
    mlp: Any = MLP
    gated_activation: Any = None
    router: Any = TopKRouter
    expert_column_linear: Any = ColumnParallelLinear  # used where experts run one after another, as the next
    expert_row_linear: Any = RowParallelLinear
    experts: ExpertsBuilder | None = None  # builds a rank's experts as one module; None: one after another
    fused_delta_rule: bool = False  # True: gated delta nets run on the kernels of flash-linear-attention
    dispatcher: str = "alltoall"  # of `actor.moe_dispatcher`
    fused_permutation: bool = False  # True: kernels of Transformer Engine sort tokens by expert
    fused_routing: bool = False  # True: its kernel chooses a token's experts; False where a choice is replayed
    overlaps_shared_experts: bool = False  # True: they may run on a stream of their own, beside exchanges of tokens
    config_fields: dict[str, Any] = field(default_factory=dict)  # fields of Megatron's TransformerConfig
    # Megatron's recompute_modules of actor.recompute=selective: activations that are large and cheap to compute
    recompute_modules: tuple[str, ...] = ("core_attn", "mlp", "moe")
    logprobs: Callable[..., tuple[Tensor, Tensor | None]] = heads.logprobs
    quantization: str = "none"  # of the linear layers' frozen weights
    one_thread: bool = False  # True: run on one thread, because results depend on the number of threads

    def layer_spec(self, layer: Layer) -> ModuleSpec:
        """Builds Megatron's spec of one transformer layer."""
        block, params = (SandwichLayer, {"norm": self.norm}) if layer.sandwich else (TransformerLayer, {})
        parts = TransformerLayerSubmodules(
            input_layernorm=IdentityOp if self.norm_linear and isinstance(layer.attention, Attention) else self.norm,
            self_attention=self._mixer(layer.attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if self.norm_linear and isinstance(layer.mlp, Mlp) else self.norm,
            mlp=self._experts(layer.mlp) if isinstance(layer.mlp, Experts) else self._mlp(),
            mlp_bda=get_bias_dropout_add,
        )
        return ModuleSpec(block, params, parts)

    def _mixer(self, block: Attention | LatentAttention | DeltaNet) -> ModuleSpec:
        if isinstance(block, DeltaNet):
            linear = {"column_linear": self.column_linear, "row_linear": self.row_linear}
            return ModuleSpec(PackedDeltaNet, {"sizes": block, "fused": self.fused_delta_rule, **linear})
        if isinstance(block, LatentAttention):
            latent_parts = LatentParts(
                self.replicated_linear, self.column_linear, self.norm, self.attention, self.row_linear
            )
            return ModuleSpec(LatentSelfAttention, {"shape": block, "parts": latent_parts})
        return self._attention(block)

    def _attention(self, block: Attention) -> ModuleSpec:
        head_norm = self.qk_norm if block.qk_norm else IdentityOp
        parts = SelfAttentionSubmodules(
            linear_qkv=self.norm_linear or self.column_linear,
            core_attention=self._core_attention(block),
            linear_proj=self.biased_row_linear if block.output_bias else self.row_linear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        )
        params = {"attn_mask_type": AttnMaskType.causal}
        if self.tables > 1:
            return ModuleSpec(OwnRotaryAttention, {**params, "table": block.rotary}, parts)
        return ModuleSpec(GatedSelfAttention if block.output_gate else SelfAttention, params, parts)

    def _core_attention(self, block: Attention) -> Any:
        if not (block.window or block.sinks):
            return self.attention
        return partial(self.windowed_attention, window=block.window, sinks=block.sinks)

    def _mlp(self) -> Callable[..., torch.nn.Module]:
        parts = MLPSubmodules(self.norm_linear or self.column_linear, self.row_linear, self.gated_activation)
        return partial(self.mlp.as_mlp_submodule, submodules=parts)

    def _experts(self, block: Experts) -> Callable[..., torch.nn.Module]:
        """Experts as one module or one after another."""
        row_linear = ExpertRowLinear if block.biased else self.expert_row_linear
        parts = MLPSubmodules(self.expert_column_linear, row_linear, self.gated_activation)
        experts = self.experts or partial(SequentialMLP, submodules=parts)
        shared = MLPSubmodules(self.column_linear, self.row_linear, self.gated_activation)
        return partial(
            MoELayer,
            submodules=MoESubmodules(
                experts=experts,
                shared_experts=partial(SharedExpertMLP, submodules=shared) if block.shared_width else None,
                router=FrozenBiasRouter if block.selection_bias else self.router,
            ),
        )


def choose_backend(
    config: EngineConfig, model: PretrainedConfig, deterministic: Determinism, trainable: bool = True
) -> LayerBackend:
    """Builds an engine's backend on this machine, by `actor.backend` and the run's `Config.determinism`.

    Only a `trainable` engine has adapters and a quantised base. With `by_library`, the whole process takes
    deterministic algorithms from here on.
    """
    determinism.enter(deterministic)
    quantization = config.lora.quantization if trainable else "none"
    has_gpu, has_te = platform.takes_gpu_options(), platform.has_transformer_engine()
    name = backend_of(config, has_gpu=has_gpu, has_te=has_te, same_bits=deterministic.same_bits)
    if name == "te":
        te = _transformer_engine(config.shared_prefix, config.recompute, frozen=config.lora.rank > 0)
        backend = dataclasses.replace(te, config_fields={**te.config_fields, **fp8.transformer_fields(config.fp8)})
        if config.lora.rank:  # an adapter reads the norm's output, and communicates by itself
            backend = dataclasses.replace(backend, norm_linear=None, overlaps_shared_experts=False)
        if config.offload_activations:  # its copies wait for one stream
            backend = dataclasses.replace(backend, overlaps_shared_experts=False)
        if quantization != "none":  # see `quantised_base.py`
            backend = dataclasses.replace(backend, **PLAIN_LINEAR)
    elif name == "cpu":
        backend = _cpu(decoder(model).attention, rotary_inv_freq(model))
    else:
        backend = _deterministic(deterministic.summands) if name == "deterministic" else _torch()
    backend = dataclasses.replace(backend, quantization=quantization)
    return _with_experts(_with_delta_nets(_fitted(backend, model), model), config)


def _fitted(backend: LayerBackend, config: PretrainedConfig) -> LayerBackend:
    """Adapts the backend to the model's activation, windows and tables of rotary frequencies."""
    model, fields = decoder(config), dict(backend.config_fields)
    backend = dataclasses.replace(backend, tables=len(rope_parameters(config)))
    if (model.windowed or backend.tables > 1) and backend.name == "cpu":  # its kernels lack windows, and take one table
        plain = _torch()
        backend = dataclasses.replace(backend, pack=plain.pack, rotary=plain.rotary, attention=plain.attention)
    experts, mlp = model.experts, model.mlp
    if experts is not None and experts.clamp:
        fields |= {"activation_func": quick_gelu, "glu_linear_offset": 1.0}
        fields["activation_func_clamp_value"] = experts.clamp
    elif mlp is not None and mlp.activation == "gelu_tanh":
        fields |= {"activation_func": gelu_tanh, "bias_activation_fusion": False}
    else:
        return backend
    fields.pop("use_te_activation_func", None)
    return dataclasses.replace(backend, config_fields=fields, gated_activation=None, mlp=MLP)


def gelu_tanh(x: Tensor) -> Tensor:
    """Computes GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


def _with_delta_nets(backend: LayerBackend, model: PretrainedConfig) -> LayerBackend:
    """Adds the order of tokens to what layers get of a microbatch, if the model has gated delta nets."""
    if decoder(model).delta_net is None:
        return backend
    if backend.fused_delta_rule:
        delta_net.check_kernels()
    return dataclasses.replace(backend, pack=delta_net.with_recurrence(backend.pack))


def _with_experts(backend: LayerBackend, config: EngineConfig) -> LayerBackend:
    """Sets how the backend computes experts and sends tokens to them: `actor.experts` and `actor.moe_dispatcher`."""
    if config.moe_dispatcher == "flex":
        megatron_patches.provide_deep_ep()
    experts = None
    if groups_experts(config, backend.name):
        experts = backend.experts or grouped_experts(backend.gated_activation)
    return dataclasses.replace(backend, experts=experts, dispatcher=config.moe_dispatcher)


def _torch() -> LayerBackend:
    return LayerBackend("torch", pack_in_blocks, config_fields={"activation_func": F.silu})


def _deterministic(summands: int) -> LayerBackend:
    """Builds the row-invariant backend, whose row-parallel products are sums of `summands` products."""
    return LayerBackend(
        "deterministic",
        pack_in_blocks,
        attention=RowInvariantAttention,
        column_linear=RowInvariantColumnLinear,
        row_linear=partial(RowInvariantRowLinear, summands=summands),
        biased_row_linear=partial(BiasedRowInvariantLinear, summands=summands),
        router=RowInvariantRouter,
        expert_column_linear=RowInvariantColumnLinear,
        expert_row_linear=partial(RowInvariantRowLinear, summands=summands),
        config_fields={"activation_func": row_invariant.silu},
        logprobs=heads.row_invariant_logprobs,
        one_thread=True,
    )


def _transformer_engine(shared_prefix: bool, recompute: str, frozen: bool) -> LayerBackend:
    """Builds the backend of Transformer Engine's modules, fused as in Megatron's own GPT recipe.

    A norm and the projection behind it are one module, except before experts. SwiGLU, rotary positions and the choice
    of experts take a kernel each. Linear layers add weight gradients to DDP's main gradient in float32; `frozen`
    experts have none. Attention over shared prompts is torch's flash attention (`attention/prefix.py`).

    `recompute` selective recomputes what is large and cheap. A layer of Qwen3-8B keeps 158 KB a token. The outputs of
    norms and SwiGLU are 41 KB of them, and are recomputed without repeating a matrix product. Flash attention keeps its
    inputs, which are kept anyway, its output, which the next product keeps, and 4 bytes a head: repeating it frees
    nothing. Repeating the MLP would free 57 KB for 78% of the layer's products; full recompute frees 150 KB for all of
    them. Experts are narrow, keep more for each product, and are repeated.
    """
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # imports the package

    provider = TESpecProvider()
    attention = provider.core_attention()
    norm, column_linear = provider.layer_norm(rms_norm=True), provider.column_parallel_linear()
    row_linear = fused_layers.accumulating(provider.row_parallel_linear())
    norm_linear, mlp = provider.column_parallel_layer_norm_linear(), MLP
    experts = provider.grouped_mlp_modules(True)
    if recompute == "selective":
        norm_linear, mlp = fused_layers.norm_before(column_linear, norm), fused_layers.RecomputingMLP
    return LayerBackend(
        "te",
        pack_segments,
        share=share_in_segments,
        rotary=RotaryTable,
        norm=norm,
        qk_norm=provider.layer_norm(rms_norm=True, for_qk=True),
        attention=with_shared_prompts(attention) if shared_prefix else attention,
        windowed_attention=in_transformer_engine(attention),
        column_linear=fused_layers.accumulating(column_linear),
        replicated_linear=fused_layers.accumulating(fused_layers.replicated(provider.linear())),
        norm_linear=fused_layers.accumulating(norm_linear),
        row_linear=row_linear,
        biased_row_linear=partial(row_linear, biased=True),
        mlp=mlp,
        experts=experts if frozen else fused_layers.accumulating_experts(experts),
        fused_permutation=True,
        router=FusedRouter,
        fused_routing=True,
        overlaps_shared_experts=True,
        fused_delta_rule=True,
        # Unfused rotary positions read the bounds of sequences from the GPU in every layer (rope_utils.py:226).
        # Dropout and biases are off, so Megatron's bias_dropout_fusion would fuse nothing.
        config_fields={"activation_func": F.silu, "apply_rope_fusion": True, "bias_activation_fusion": True},
        recompute_modules=("moe",),
    )


def _cpu(block: Attention | LatentAttention, inv_freq: Tensor) -> LayerBackend:
    """Builds the backend of `megarl/cpu`. Its layers fall back to the torch layers for sequences cut over ranks.

    Its attention rotates entire heads. Latent attention, and heads rotated in part, have the torch layers.
    """
    from megarl.cpu import layers

    plain = _torch()
    norm = layers.fused_rms_norm(RMSNorm)
    fused = dataclasses.replace(
        plain,
        name="cpu",
        norm=norm,
        qk_norm=norm,
        gated_activation=layers.FusedSwiGLU,
        # With this field, Megatron passes gate and up as one tensor to the spec's activation module.
        config_fields={"activation_func": F.silu, "use_te_activation_func": True},
    )
    if isinstance(block, LatentAttention) or 2 * len(inv_freq) < block.head_dim:
        return fused
    return dataclasses.replace(
        fused,
        pack=layers.packing(plain.pack, inv_freq),
        rotary=layers.NoRotary,
        attention=layers.fused_attention(PackedAttention),
    )
