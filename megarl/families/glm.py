"""GLM-4.5 to GLM-4.7, with grouped-query attention, and GLM-4.7-Flash, with latent attention."""

from __future__ import annotations

from transformers import PretrainedConfig

from megarl.families.blocks import Decoder, Layer, Mlp
from megarl.families.deepseek import behind_dense_layers, latent_attention, sigmoid_experts
from megarl.families.llama import attention, decoder_of


def glm4_moe(config: PretrainedConfig) -> Decoder:
    """Reads GLM-4.5 to GLM-4.7: rotary positions over half of a head, norms of queries and keys in some sizes."""
    block = attention(config, qkv_bias=bool(config.attention_bias), qk_norm=bool(config.use_qk_norm))
    return behind_dense_layers(config, block)


def glm4_moe_lite(config: PretrainedConfig) -> Decoder:
    """Reads GLM-4.7-Flash, which lists its dense layers."""
    block, mlp, experts = latent_attention(config), Mlp(config.intermediate_size), sigmoid_experts(config)
    return decoder_of(config, [Layer(block, experts if kind == "sparse" else mlp) for kind in config.mlp_layer_types])
