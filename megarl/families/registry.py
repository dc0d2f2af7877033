"""Supported model families by HF `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.families import llama, mixtral, qwen
from megarl.families.blocks import Decoder


@dataclass(frozen=True)
class Family:
    """Functions and traits of a HF `model_type`."""

    read: Callable[[PretrainedConfig], Decoder]
    experts: bool = False  # True: a mixture of experts
    sglang_ties_head: bool = True  # False: SGLang stores tied embeddings twice, as embed_tokens and as lm_head


FAMILIES = {
    "llama": Family(llama.llama),
    "mistral": Family(llama.mistral),
    "mixtral": Family(mixtral.mixtral, experts=True, sglang_ties_head=False),
    "qwen2": Family(qwen.qwen2),
    "qwen3": Family(qwen.qwen3),
    "qwen3_moe": Family(qwen.qwen3_moe, experts=True, sglang_ties_head=False),
}


def decoder(config: PretrainedConfig) -> Decoder:
    """Reads the shape of a model from its config, of a checkpoint or of a live SGLang model.

    Raises:
        KeyError: the family is not in `FAMILIES`.
    """
    return FAMILIES[config.model_type].read(config)
