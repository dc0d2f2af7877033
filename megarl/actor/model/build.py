"""From a HF config to Megatron's `GPTModel`: how the fields map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from megarl.actor.batch.context_parallel import Cut, LocalTokens
from megarl.actor.model.deterministic_layers import (
    RowInvariantAttention,
    RowInvariantColumnLinear,
    RowInvariantRowLinear,
)
from megarl.actor.model.heads import HeadlessGPT, ValueHead
from megarl.actor.model.moe import mark_experts, moe_fields
from megarl.actor.model.norms import RMSNorm
from megarl.actor.model.packed_attention import (
    PackedAttention,
    PackedRotary,
    PackedSequences,
    packed_for_kernel,
    packed_for_te,
    packed_sequences,
)
from megarl.cpu.layers import CosSinRotary, FusedAttention, FusedRMSNorm, FusedSwiGLU
from megarl.families import (
    FAMILIES,
    attention_biases,
    head_dim,
    is_scalar,
    moe_shape,
    padded_vocab_size,
    rotary_inv_freq,
)
from megarl.ops import row_invariant
from megarl.parallel import platform
from megarl.parallel.groups import Groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# actor.recompute as Megatron's fields. Selective keeps what is dear to compute and drops what is large: the attention
# core's blocks and the MLP's (experts') inside. Full keeps the input of each layer.
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def has_kernels(dtype: torch.dtype, deterministic: bool) -> bool:
    """Whether layers are of `fused.py`. A deterministic run keeps torch's norms and rotary embedding, whose bits are
    those of the rollout server."""
    return dtype == torch.float32 and not deterministic and not platform.has_gpu()


def packing(
    dtype: torch.dtype, te: bool, deterministic: bool, groups: Groups
) -> Callable[[torch.Tensor, torch.device, Cut, LocalTokens | None], PackedSequences]:
    """What turns a microbatch's sequences into what the attention of the model's layers takes."""
    if te:
        return packed_for_te
    return packed_for_kernel if has_kernels(dtype, deterministic) and groups.cp_size == 1 else packed_sequences


def transformer_config(
    config: PretrainedConfig, groups: Groups, dtype: torch.dtype, recompute: str = "none", deterministic: bool = False
) -> TransformerConfig:
    """Megatron's config for the HF config on this layout."""
    family, layout = FAMILIES[config.model_type], groups.layout
    on_gpu = platform.has_gpu()
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=row_invariant.silu if deterministic else F.silu,
        use_te_activation_func=has_kernels(dtype, deterministic),  # the layer spec's, which takes gate and up as one
        add_bias_linear=False,
        add_qkv_bias=attention_biases(config)[0],
        qk_layernorm=family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.tp_size,
        sequence_parallel=layout.sequence_parallel,
        context_parallel_size=groups.cp_size,
        expert_model_parallel_size=groups.ep_size,
        expert_tensor_parallel_size=groups.etp_size,
        pipeline_model_parallel_size=groups.pp_size,
        virtual_pipeline_model_parallel_size=groups.vpp_size if groups.vpp_size > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers or None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        autocast_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one that variable lengths allow
        **moe_fields(config, grouped=False),
        calculate_per_token_loss=True,  # the loss is normalised once, by engine.py
        use_cpu_initialization=not on_gpu,
        init_method=_leave,  # hf.py writes every element
        output_layer_init_method=_leave,
        batch_p2p_comm=on_gpu,
        **RECOMPUTE[recompute],
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    """Megatron's initialisation also marks what tp splits, and gradient norms count by these marks: it runs, idle."""
    return tensor


def _layer_specs(
    config: PretrainedConfig, layers: range, te: bool, deterministic: bool, fused: bool
) -> TransformerBlockSubmodules:
    """What the given layers are made of; some may have experts and some not.

    `fused` takes those of `fused.py`. `te` puts Transformer Engine's modules in their places, norms apart from the
    matrices behind them, so that native parameters have the same names and shapes with either. Experts stay Megatron's
    own.
    """
    qk_norm = FAMILIES[config.model_type].qk_norm
    norm: Any = FusedRMSNorm if fused else RMSNorm
    norm_qk: Any = norm
    if te:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # imports the package

        provider = TESpecProvider()
        norm, norm_qk = provider.layer_norm(rms_norm=True), provider.layer_norm(rms_norm=True, for_qk=True)
    moe = moe_shape(config)
    specs = []
    for layer in layers:
        spec = get_gpt_layer_local_spec(
            num_experts=moe.experts if moe is not None and moe.layers[layer] else None,
            qk_layernorm=qk_norm,
            normalization="RMSNorm",
        )
        parts, attention = spec.submodules, spec.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        if qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm_qk
        attention.core_attention = FusedAttention if fused else PackedAttention
        if fused:
            mlp = parts.mlp.submodules
            gated = mlp if moe is None or not moe.layers[layer] else mlp.experts.submodules
            gated.activation_func = FusedSwiGLU
        if te:
            attention.core_attention = provider.core_attention()
            attention.linear_qkv = provider.column_parallel_linear()
            attention.linear_proj = provider.row_parallel_linear()
            if moe is None or not moe.layers[layer]:
                parts.mlp.submodules.linear_fc1 = provider.column_parallel_linear()
                parts.mlp.submodules.linear_fc2 = provider.row_parallel_linear()
        if deterministic:
            attention.core_attention = RowInvariantAttention
            attention.linear_qkv = parts.mlp.submodules.linear_fc1 = RowInvariantColumnLinear
            attention.linear_proj = parts.mlp.submodules.linear_fc2 = RowInvariantRowLinear
        if attention_biases(config)[1]:
            attention.linear_proj = BiasedRowInvariantLinear if deterministic else BiasedRowParallelLinear
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


class BiasedRowParallelLinear(RowParallelLinear):
    """Attention's output projection with a bias, in a model whose other projections may have none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


class BiasedRowInvariantLinear(BiasedRowParallelLinear, RowInvariantRowLinear):
    """The same for a deterministic run."""


def build_model(
    config: PretrainedConfig,
    groups: Groups,
    dtype: torch.dtype,
    recompute: str = "none",
    te: bool = False,
    deterministic: bool = False,
) -> list[GPTModel]:
    """This rank's virtual stages of the model, their parameters not yet filled (see `hf.py`). `te`: of Transformer
    Engine's modules; `deterministic`: of those of `row_invariant.py`."""
    megatron = transformer_config(config, groups, dtype, recompute, deterministic)
    fused = has_kernels(dtype, deterministic)
    modules = []
    for stage, layers in enumerate(groups.layout.stage_layers(config.num_hidden_layers)[groups.pp_rank]):
        with platform.scope():
            module = HeadlessGPT(
                config=megatron,
                transformer_layer_spec=_layer_specs(config, layers, te, deterministic, fused),
                vocab_size=padded_vocab_size(config, groups.tp_size),
                max_sequence_length=config.max_position_embeddings,
                pre_process=groups.pp_rank == 0 and stage == 0,
                post_process=groups.is_last_stage and stage == groups.vpp_size - 1,
                parallel_output=True,
                share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
                position_embedding_type="rope",
                pg_collection=groups.collection,
                vp_stage=stage if groups.vpp_size > 1 else None,
            )
        mark_experts(module)
        if module.post_process and is_scalar(config):
            module.output_layer = ValueHead(megatron)
        module.rotary_pos_emb = (CosSinRotary if fused else PackedRotary)(rotary_inv_freq(config))
        modules.append(module.to(platform.device()))
    return modules
