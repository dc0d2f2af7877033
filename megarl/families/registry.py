"""Supported model families by HF `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig

from megarl.families import deepseek, gemma3, glm, gpt_oss, llama, mixtral, mtp, qwen, qwen3_next
from megarl.families.blocks import Decoder, MtpLayer


@dataclass(frozen=True)
class Family:
    """Functions and traits of a HF `model_type`."""

    read: Callable[[PretrainedConfig], Decoder]
    experts: bool = False  # True: a mixture of experts
    stacked_experts: bool = False  # True: checkpoints have all experts of a layer in one tensor
    carried: tuple[str, ...] = ()  # prefixes of tensors that are no part of the actor's model: MTP, vision
    mtp: Callable[[PretrainedConfig, Decoder], tuple[MtpLayer, ...]] = lambda config, model: ()  # the trainable ones
    problem: Callable[[PretrainedConfig], str] = lambda config: ""  # what the actor cannot run; "": nothing
    sglang_untouched: tuple[str, ...] = ()  # prefixes of SGLang's parameters that training does not change
    sglang_ties_head: bool = True  # False: SGLang stores tied embeddings twice, as embed_tokens and as lm_head
    sglang_shards_embedding: bool = True  # False: every rank of a server holds the whole embedding
    # Number of first layers to which SGLang gives no experts; it gives them to all others of a mixture of experts.
    sglang_dense: Callable[[PretrainedConfig], int] = lambda config: 0
    sglang_windows: bool = False  # True: SGLang's model attends in sliding windows; others see all tokens
    fields: dict[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})  # supported values of the config
    quantisation: str = "fp8"  # method whose weights are read, besides plain ones


GEMMA3_FIELDS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "tie_word_embeddings": True,  # SGLang's loader leaves out any other head
}
GPT_OSS_FIELDS = {
    "hidden_act": "silu",
    "attention_bias": True,
    "swiglu_alpha": gpt_oss.ALPHA,
    "tie_word_embeddings": False,
}
REFUSED = {"gemma2": "logit soft-capping"}  # families that are often asked for, and the trait that is missing


def _behind_dense_layers(read: Callable[[PretrainedConfig], Decoder]) -> Family:
    """Describes a family with experts behind dense layers, and numbered layers of multi-token prediction."""
    return Family(
        read, experts=True, mtp=mtp.numbered, sglang_ties_head=False, sglang_dense=deepseek.first_dense_layers
    )


FAMILIES = {
    "gemma3_text": Family(
        gemma3.gemma3_text,
        sglang_shards_embedding=False,
        sglang_windows=True,
        fields=GEMMA3_FIELDS,
    ),
    "gpt_oss": Family(
        gpt_oss.gpt_oss,
        experts=True,
        sglang_ties_head=False,
        sglang_windows=True,
        fields=GPT_OSS_FIELDS,
        quantisation="mxfp4",
    ),
    "llama": Family(llama.llama),
    "mistral": Family(llama.mistral),
    "mixtral": Family(mixtral.mixtral, experts=True, sglang_ties_head=False),
    "qwen2": Family(qwen.qwen2),
    "qwen3": Family(qwen.qwen3),
    "qwen3_moe": Family(qwen.qwen3_moe, experts=True, sglang_ties_head=False),
    "deepseek_v3": _behind_dense_layers(deepseek.deepseek_v3),
    "glm4_moe": _behind_dense_layers(glm.glm4_moe),
    "glm4_moe_lite": _behind_dense_layers(glm.glm4_moe_lite),
    "kimi_k2": _behind_dense_layers(deepseek.deepseek_v3),
    "qwen3_next": Family(
        qwen3_next.qwen3_next,
        experts=True,
        carried=("mtp.",),
        mtp=mtp.under_mtp,
        problem=qwen3_next.problem,
        sglang_ties_head=False,
    ),
    "qwen3_5_text": Family(
        qwen3_next.qwen3_5,
        carried=("mtp.", "model.visual."),
        mtp=mtp.under_mtp,
        problem=qwen3_next.problem,
        sglang_untouched=("visual.",),
    ),
    "qwen3_5_moe_text": Family(
        qwen3_next.qwen3_5_moe,
        experts=True,
        stacked_experts=True,
        carried=("mtp.", "model.visual."),
        mtp=mtp.under_mtp,
        problem=qwen3_next.problem,
        sglang_untouched=("visual.",),
    ),
}

CONTAINERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # multimodal models, and their text parts


def decoder(config: PretrainedConfig) -> Decoder:
    """Reads the shape of a model from its config, of a checkpoint or of a live SGLang model.

    Layers of multi-token prediction are in it only under the mark of `families/mtp.py`.

    Raises:
        KeyError: the family is not in `FAMILIES`.
    """
    family = FAMILIES[config.model_type]
    model = family.read(config)
    return replace(model, mtp=family.mtp(config, model)) if mtp.trains_mtp(config) else model
