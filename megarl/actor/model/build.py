"""Builds Megatron's `GPTModel` from a HF config."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from megarl.actor.model import heads, quantised_base, shared_base
from megarl.actor.model.backends import LayerBackend
from megarl.actor.model.heads import HeadlessGPT, ValueHead
from megarl.actor.model.moe import clear_expert_marks, moe_fields, overlaps_shared_experts
from megarl.actor.model.mtp import MtpLayers
from megarl.actor.weights.adapter_shards import linear_modules
from megarl.actor.weights.shards import shard_specs
from megarl.families import decoder, is_scalar, padded_vocab_size, rotary_inv_freq
from megarl.families.blocks import Decoder, LatentAttention
from megarl.parallel import determinism, megatron_patches, platform
from megarl.parallel.groups import Groups
from megarl.parallel.placement import place_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    config: PretrainedConfig,
    groups: Groups,
    dtype: torch.dtype,
    backend: LayerBackend,
    recompute: str = "none",
    offloaded_layers: int = 0,
) -> TransformerConfig:
    """Builds Megatron's config from the HF config, on this layout."""
    model, layout = decoder(config), groups.layout
    attention = model.attention
    on_gpu = platform.takes_gpu_options()
    # Virtual stages overlap exchanges with computation, for which Megatron wants no batches (schedules.py:1059). Two
    # such stages could not batch: each is the other's previous and next one, and a batch matches by order alone.
    overlapped = groups.vpp_size > 1
    return TransformerConfig(
        num_layers=len(model.layers),
        hidden_size=model.hidden,
        ffn_hidden_size=model.mlp_width,
        num_attention_heads=attention.heads,
        num_query_groups=attention.kv_heads,
        kv_channels=attention.head_dim,
        rotary_interleaved=isinstance(attention, LatentAttention),
        layernorm_epsilon=model.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        layernorm_zero_centered_gamma=model.zero_centered_norms,
        **backend.config_fields,
        softmax_scale=attention.softmax_scale,
        add_bias_linear=model.experts is not None and model.experts.biased,
        add_qkv_bias=attention.qkv_bias,
        qk_layernorm=attention.qk_norm,
        attention_output_gate=attention.output_gate,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.tp_size,
        sequence_parallel=layout.sequence_parallel,
        tp_comm_overlap=layout.tp_comm_overlap,
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
        variable_seq_lengths=True,  # shapes come from PlannedExchanges
        **moe_fields(
            model,
            dispatcher=backend.dispatcher,
            grouped=backend.experts is not None,
            fused_permutation=backend.fused_permutation,
            fused_routing=backend.fused_routing,
            overlapped=backend.overlaps_shared_experts and overlaps_shared_experts(layout),
        ),
        calculate_per_token_loss=True,  # Megatron must not normalise the loss; engine.py does, once
        use_cpu_initialization=not on_gpu,
        init_method=_no_init,  # hf_weights.py writes every element
        output_layer_init_method=_no_init,
        overlap_p2p_comm=overlapped,
        batch_p2p_comm=on_gpu and not overlapped,
        batch_p2p_sync=False,  # waiting for a batch orders the stream since torch 1.13 (pytorch/pytorch#82450)
        deterministic_mode=determinism.entered(),
        **_recompute_fields(recompute, backend),
        cpu_offloading=offloaded_layers > 0,
        cpu_offloading_num_layers=offloaded_layers,
    )


def _recompute_fields(recompute: str, backend: LayerBackend) -> dict[str, Any]:
    """Gives actor.recompute as Megatron's fields. Full keeps only each layer's input."""
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(backend.recompute_modules)}
    return {}


def _no_init(tensor: torch.Tensor) -> torch.Tensor:
    """No-op: Megatron's initialisation must still run to set tensor-parallel marks, which gradient norms need."""
    return tensor


def _layer_specs(model: Decoder, layers: range, backend: LayerBackend) -> TransformerBlockSubmodules:
    """Builds the specs of the given layers."""
    specs = [backend.layer_spec(model.layers[i]) for i in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=backend.norm)


def build_model(
    config: PretrainedConfig,
    groups: Groups,
    dtype: torch.dtype,
    backend: LayerBackend,
    recompute: str = "none",
    offloaded_layers: int = 0,
    base: Sequence[GPTModel] = (),
) -> list[GPTModel]:
    """Builds this rank's virtual stages of the model, and its layers of multi-token prediction if they are trained.

       `hf_weights.py` fills their parameters.

       Activations of the first `offloaded_layers` wait on the host for backward. With `base`, the stages of another
       engine's frozen model, no parameter but a value head is allocated: the stages take the parameters of `base`.
    Linear layers of
       a quantised base have codes in place of weights (`quantised_base.py`).
    """
    megatron = transformer_config(config, groups, dtype, backend, recompute, offloaded_layers)
    quantised = backend.quantization != "none"
    if base or quantised:  # Megatron must not exchange tied embeddings during the build
        setattr(megatron, "init_model_with_meta_device", True)  # noqa: B010 (only Megatron reads it)
    without_memory = (
        shared_base.without_memory if base else quantised_base.without_weights if quantised else contextlib.nullcontext
    )
    modules = []
    for stage, layers in enumerate(groups.layout.stage_layers(config.num_hidden_layers)[groups.pp_rank]):
        with megatron_patches.scope(), without_memory():
            module = HeadlessGPT(
                config=megatron,
                transformer_layer_spec=_layer_specs(decoder(config), layers, backend),
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
        if module.post_process and is_scalar(config):
            module.output_layer = ValueHead(megatron)
        if quantised:
            names = linear_modules(shard_specs(config, groups.layout, place_of(groups.layout, groups.rank)))
            device = "meta" if base else platform.device()
            quantised_base.quantise_layers(module, names.get(stage, []), backend.quantization, device)
        if base:
            shared_base.take(module, base[stage])
        if module.pre_process:
            heads.scale_embeddings(module.embedding, decoder(config).embedding_scale)
        clear_expert_marks(module)
        module.rotary_pos_emb = backend.rotary(rotary_inv_freq(config))
        modules.append(module.to(platform.device()))
    if decoder(config).mtp and groups.is_last_stage:
        with megatron_patches.scope():
            mtp = MtpLayers(megatron, decoder(config).mtp, backend, groups)
        clear_expert_marks(mtp)
        modules.append(mtp.to(platform.device()))
    return modules
