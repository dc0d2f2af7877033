"""Llama and Mistral: the common decoder. Other families add to it."""

from __future__ import annotations

from transformers import PretrainedConfig

from megarl.families.blocks import Attention, Decoder, Experts, Layer, Mlp


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head; transformers' default is `hidden_size / num_attention_heads`."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def attention(
    config: PretrainedConfig, *, qkv_bias: bool = False, output_bias: bool = False, qk_norm: bool = False
) -> Attention:
    """Reads grouped-query attention; SGLang's own configs may lack the number of KV heads."""
    return Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim(config),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )


def decoder_of(config: PretrainedConfig, layers: list[Layer]) -> Decoder:
    """Adds the parts around the layers."""
    return Decoder(
        layers=tuple(layers),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        norm_eps=config.rms_norm_eps,
    )


def alike(config: PretrainedConfig, block: Attention, mlp: Mlp | Experts) -> Decoder:
    """Builds a decoder whose layers are all alike."""
    return decoder_of(config, [Layer(block, mlp)] * config.num_hidden_layers)


def llama(config: PretrainedConfig) -> Decoder:
    """Reads Llama, whose `attention_bias` adds biases to all four projections."""
    biased = bool(getattr(config, "attention_bias", False))
    return alike(config, attention(config, qkv_bias=biased, output_bias=biased), Mlp(config.intermediate_size))


def mistral(config: PretrainedConfig) -> Decoder:
    """Reads Mistral, which has no biases."""
    return alike(config, attention(config), Mlp(config.intermediate_size))
