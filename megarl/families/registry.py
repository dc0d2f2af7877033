"""Supported model families by HF `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.families import llama, mixtral, qwen, qwen3_next
from megarl.families.blocks import Decoder


@dataclass(frozen=True)
class Family:
    """Functions and traits of a HF `model_type`."""

    read: Callable[[PretrainedConfig], Decoder]
    experts: bool = False  # True: a mixture of experts
    stacked_experts: bool = False  # True: checkpoints have all experts of a layer in one tensor
    carried: tuple[str, ...] = ()  # prefixes of tensors that are no part of the actor's model: MTP, vision
    problem: Callable[[PretrainedConfig], str] = lambda config: ""  # of its config that the actor cannot run
    sglang_untouched: tuple[str, ...] = ()  # prefixes of SGLang's parameters that training does not change
    sglang_ties_head: bool = True  # False: SGLang stores tied embeddings twice, as embed_tokens and as lm_head


FAMILIES = {
    "llama": Family(llama.llama),
    "mistral": Family(llama.mistral),
    "mixtral": Family(mixtral.mixtral, experts=True, sglang_ties_head=False),
    "qwen2": Family(qwen.qwen2),
    "qwen3": Family(qwen.qwen3),
    "qwen3_moe": Family(qwen.qwen3_moe, experts=True, sglang_ties_head=False),
    "qwen3_next": Family(
        qwen3_next.qwen3_next, experts=True, carried=("mtp.",), problem=qwen3_next.problem, sglang_ties_head=False
    ),
    "qwen3_5_text": Family(
        qwen3_next.qwen3_5,
        carried=("mtp.", "model.visual."),
        problem=qwen3_next.problem,
        sglang_untouched=("visual.",),
    ),
    "qwen3_5_moe_text": Family(
        qwen3_next.qwen3_5_moe,
        experts=True,
        stacked_experts=True,
        carried=("mtp.", "model.visual."),
        problem=qwen3_next.problem,
        sglang_untouched=("visual.",),
    ),
}

CONTAINERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # multimodal models, and their text parts


def decoder(config: PretrainedConfig) -> Decoder:
    """Reads the shape of a model from its config, of a checkpoint or of a live SGLang model.

    Raises:
        KeyError: the family is not in `FAMILIES`.
    """
    return FAMILIES[config.model_type].read(config)
