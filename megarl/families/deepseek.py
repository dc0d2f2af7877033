"""DeepSeek-V3, Moonlight, Kimi-K2's text model, and GLM-4.7-Flash: latent attention, experts behind dense layers."""

from __future__ import annotations

import math
from typing import Any

from transformers import DeepseekV3Config, PretrainedConfig

from megarl.families.blocks import Attention, Decoder, ExpertNames, Experts, LatentAttention, Layer, Mlp
from megarl.families.llama import decoder_of

LATENT_NORM_EPS = 1e-6  # transformers' default for a norm; the config's is that of the other norms


class KimiK2Config(DeepseekV3Config):
    """Config of Kimi-K2's text model, which is a DeepSeek-V3 under a name that transformers lacks."""

    model_type = "kimi_k2"


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's correction of attention for a context `factor` times as long (arXiv:2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_scales(rope: dict[str, Any]) -> tuple[float, float]:
    """Factors on rotated elements and on the scores of attention; 1 without YaRN.

    A live SGLang model's type is always `deepseek_yarn`, with a factor or without.
    """
    if rope.get("rope_type", "default") not in ("yarn", "deepseek_yarn") or "factor" not in rope:
        return 1.0, 1.0
    factor, all_dim = rope["factor"], rope.get("mscale_all_dim") or 0.0
    rotary = _mscale(factor, 1.0)
    if rope.get("attention_factor") is not None:
        rotary = rope["attention_factor"]
    elif rope.get("mscale") and all_dim:
        rotary = _mscale(factor, rope["mscale"]) / _mscale(factor, all_dim)
    return rotary, _mscale(factor, all_dim) ** 2


def latent_attention(config: PretrainedConfig) -> LatentAttention:
    """Reads latent attention."""
    rotary_scale, score_scale = yarn_scales(getattr(config, "rope_parameters", None) or {})
    return LatentAttention(
        heads=config.num_attention_heads,
        query_rank=config.q_lora_rank or 0,
        kv_rank=config.kv_lora_rank,
        plain_dim=config.qk_nope_head_dim,
        rotary_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        softmax_scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * score_scale,
        rotary_scale=rotary_scale,
        norm_eps=LATENT_NORM_EPS,
    )


def sigmoid_experts(config: PretrainedConfig) -> Experts:
    """Reads experts chosen by sigmoid scores with a bias, and the shared ones."""
    return Experts(
        count=config.n_routed_experts,
        width=config.moe_intermediate_size,
        topk=config.num_experts_per_tok,
        normalized=config.norm_topk_prob,
        names=ExpertNames(),
        score="sigmoid",
        selection_bias=True,
        groups=config.n_group or 1,
        topk_groups=config.topk_group or 1,
        scale=config.routed_scaling_factor,
        shared_width=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )


def first_dense_layers(config: PretrainedConfig) -> int:
    """Counts the dense layers before the first with experts. GLM-4.7-Flash may list its layers instead."""
    return getattr(config, "first_k_dense_replace", None) or 0


def behind_dense_layers(config: PretrainedConfig, block: Attention | LatentAttention) -> Decoder:
    """Builds a decoder whose first `first_k_dense_replace` layers have an MLP, and the others experts."""
    dense = first_dense_layers(config)
    mlp, experts = Mlp(config.intermediate_size), sigmoid_experts(config)
    return decoder_of(config, [Layer(block, mlp if i < dense else experts) for i in range(config.num_hidden_layers)])


def deepseek_v3(config: PretrainedConfig) -> Decoder:
    """Reads DeepSeek-V3."""
    return behind_dense_layers(config, latent_attention(config))
