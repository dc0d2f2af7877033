"""gpt-oss: experts with biases and clamps, sinks, and a sliding window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from megarl.families.blocks import Decoder, ExpertNames, Experts, Layer
from megarl.families.llama import attention, decoder_of, window_of

ALPHA = 1.702  # of the experts' sigmoid, as in Megatron's quick_gelu
NAMES = ExpertNames(router="router", interleaved=True)


def gpt_oss(config: PretrainedConfig) -> Decoder:
    """Reads gpt-oss, whose `intermediate_size` is an expert's."""
    experts = Experts(
        count=config.num_local_experts,
        width=config.intermediate_size,
        topk=config.num_experts_per_tok,
        normalized=True,
        names=NAMES,
        biased=True,
        clamp=config.swiglu_limit,
    )
    block = attention(config, qkv_bias=True, output_bias=True, sinks=True)
    windows = [window_of(config, i) for i in range(config.num_hidden_layers)]
    return decoder_of(config, [Layer(replace(block, window=window), experts) for window in windows])
