"""Qwen2, Qwen2.5 and Qwen3, dense and as mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from megarl.families.blocks import Attention, Decoder, ExpertNames, Experts, Layer, Mlp
from megarl.families.llama import attention, decoder_of, window_of


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
    """Reads Qwen3-MoE, which may have dense layers between the sparse ones."""
    block = _qwen3_attention(config, window_of(config))
    experts = Experts(
        count=config.num_experts,
        width=config.moe_intermediate_size,
        topk=config.num_experts_per_tok,
        normalized=config.norm_topk_prob,
        names=ExpertNames(),
    )
    return decoder_of(config, [Layer(block, mlp) for mlp in interleaved_mlps(config, experts)])


def interleaved_mlps(config: PretrainedConfig, experts: Experts) -> list[Mlp | Experts]:
    """Lists experts for every `decoder_sparse_step`-th layer, except `mlp_only_layers`, and MLPs for the others."""
    mlp, dense = Mlp(config.intermediate_size), set(config.mlp_only_layers or ())
    return [
        experts if i not in dense and (i + 1) % config.decoder_sparse_step == 0 else mlp
        for i in range(config.num_hidden_layers)
    ]
