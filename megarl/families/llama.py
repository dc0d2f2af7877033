"""Llama and Mistral: the common decoder. Other families add to it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from megarl.families.blocks import Attention, Decoder, Experts, Layer, Mlp
from megarl.families.rotary import head_dim, scores_factor


def window_of(config: PretrainedConfig, layer: int | None = None) -> int:
    """Reads the sliding window of a layer, 0 for none: by `layer_types`, or of all layers without it.

    A window of all positions that the model has is none.
    """
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if layer is not None and types is not None and types[layer] != "sliding_attention":
        return 0
    return window if window is not None and window < config.max_position_embeddings else 0


def attention(config: PretrainedConfig, **traits: Any) -> Attention:
    """Reads grouped-query attention; SGLang's own configs may lack the number of KV heads. `traits` are its others."""
    factor = scores_factor(config)
    if factor != 1.0:
        traits["softmax_scale"] = head_dim(config) ** -0.5 * factor
    return Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim(config),
        **traits,
    )


def decoder_of(config: PretrainedConfig, layers: list[Layer], **traits: Any) -> Decoder:
    """Adds the parts around the layers."""
    return Decoder(
        layers=tuple(layers),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        norm_eps=config.rms_norm_eps,
        **traits,
    )


def alike(config: PretrainedConfig, block: Attention, mlp: Mlp | Experts) -> Decoder:
    """Builds a decoder whose layers are all alike."""
    return decoder_of(config, [Layer(block, mlp)] * config.num_hidden_layers)


def llama(config: PretrainedConfig) -> Decoder:
    """Reads Llama, whose `attention_bias` adds biases to all four projections."""
    biased = bool(getattr(config, "attention_bias", False))
    return alike(config, attention(config, qkv_bias=biased, output_bias=biased), Mlp(config.intermediate_size))


def mistral(config: PretrainedConfig) -> Decoder:
    """Reads Mistral, which has no biases, and may have a window in every layer."""
    return alike(config, attention(config, window=window_of(config)), Mlp(config.intermediate_size))
