"""Gemma 3's text models: norms on both sides, windows with positions of their own, scaled embeddings."""

from __future__ import annotations

from transformers import PretrainedConfig

from megarl.families.blocks import Decoder, Layer, Mlp
from megarl.families.llama import attention, decoder_of, window_of
from megarl.families.rotary import LAYER_TYPES


def gemma3_text(config: PretrainedConfig) -> Decoder:
    """Reads Gemma 3: a local layer has a window, and rotary positions of another base."""
    mlp, layers = Mlp(config.intermediate_size, "gelu_tanh"), []
    for i, kind in enumerate(config.layer_types):
        block = attention(
            config,
            qk_norm=True,
            window=window_of(config, i),
            softmax_scale=config.query_pre_attn_scalar**-0.5,
            rotary=LAYER_TYPES.index(kind),
        )
        layers.append(Layer(block, mlp, sandwich=True))
    return decoder_of(config, layers, zero_centered_norms=True, embedding_scale=config.hidden_size**0.5)
