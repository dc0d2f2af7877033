"""Qwen2, Qwen2.5 and Qwen3, dense and as mixtures of experts."""

from __future__ import annotations

from transformers import PretrainedConfig

from megarl.families.blocks import Attention, Decoder, ExpertNames, Experts, Layer, Mlp
from megarl.families.llama import alike, attention, decoder_of

QWEN3_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


def qwen2(config: PretrainedConfig) -> Decoder:
    """Reads Qwen2: biases on queries, keys and values."""
    return alike(config, attention(config, qkv_bias=True), Mlp(config.intermediate_size))


def _qwen3_attention(config: PretrainedConfig) -> Attention:
    biased = bool(getattr(config, "attention_bias", False))
    return attention(config, qkv_bias=biased, output_bias=biased, qk_norm=True)


def qwen3(config: PretrainedConfig) -> Decoder:
    """Reads Qwen3: norms of queries and keys."""
    return alike(config, _qwen3_attention(config), Mlp(config.intermediate_size))


def qwen3_moe(config: PretrainedConfig) -> Decoder:
    """Reads Qwen3-MoE: every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    block, dense = _qwen3_attention(config), set(config.mlp_only_layers or ())
    experts = Experts(
        count=config.num_experts,
        width=config.moe_intermediate_size,
        topk=config.num_experts_per_tok,
        normalized=config.norm_topk_prob,
        names=QWEN3_EXPERTS,
    )
    layers = []
    for i in range(config.num_hidden_layers):
        sparse = i not in dense and (i + 1) % config.decoder_sparse_step == 0
        layers.append(Layer(block, experts if sparse else Mlp(config.intermediate_size)))
    return decoder_of(config, layers)
