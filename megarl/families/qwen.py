"""Qwen2, Qwen2.5 and Qwen3, dense and as mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from megarl.families.blocks import Attention, Decoder, ExpertNames, Experts, Layer, Mlp
from megarl.families.llama import attention, decoder_of, window_of

QWEN3_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


def qwen2(config: PretrainedConfig) -> Decoder:
    """Reads Qwen2: biases on queries, keys and values."""
    return _windowed(config, attention(config, qkv_bias=True))


def _windowed(config: PretrainedConfig, block: Attention) -> Decoder:
    """Builds a dense decoder. With `use_sliding_window`, layers from `max_window_layers` on have a window."""
    mlp = Mlp(config.intermediate_size)
    windows = [window_of(config, i) for i in range(config.num_hidden_layers)]
    return decoder_of(config, [Layer(replace(block, window=window), mlp) for window in windows])


def _qwen3_attention(config: PretrainedConfig, window: int = 0) -> Attention:
    biased = bool(getattr(config, "attention_bias", False))
    return attention(config, qkv_bias=biased, output_bias=biased, qk_norm=True, window=window)


def qwen3(config: PretrainedConfig) -> Decoder:
    """Reads Qwen3: norms of queries and keys."""
    return _windowed(config, _qwen3_attention(config))


def qwen3_moe(config: PretrainedConfig) -> Decoder:
    """Reads Qwen3-MoE: every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    block, dense = _qwen3_attention(config, window_of(config)), set(config.mlp_only_layers or ())
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
