"""Qwen3-Next and Qwen3.5: gated delta nets, with gated attention in every fourth layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from megarl.families.blocks import Decoder, DeltaNet, ExpertNames, Experts, Layer, Mlp
from megarl.families.llama import attention, decoder_of
from megarl.families.qwen import interleaved_mlps


def _hybrid(config: PretrainedConfig, mlps: list[Mlp | Experts], *, grouped: bool) -> Decoder:
    """Builds the decoder whose `layer_types` say where attention stands."""
    biased = bool(getattr(config, "attention_bias", False))
    full = attention(config, qkv_bias=biased, output_bias=biased, qk_norm=True, output_gate=True)
    linear = DeltaNet(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        grouped=grouped,
    )
    blocks = [full if is_full else linear for is_full in _full_layers(config)]
    layers = [Layer(block, mlp) for block, mlp in zip(blocks, mlps, strict=True)]
    return decoder_of(config, layers, zero_centered_norms=True)


def _full_layers(config: PretrainedConfig) -> list[bool]:
    """By layer: True if it has attention. SGLang's own config of Qwen3-Next has an interval alone."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [(i + 1) % config.full_attention_interval == 0 for i in range(config.num_hidden_layers)]
    return [kind == "full_attention" for kind in kinds]


def _experts(config: PretrainedConfig) -> Experts:
    return Experts(
        count=config.num_experts,
        width=config.moe_intermediate_size,
        topk=config.num_experts_per_tok,
        normalized=getattr(config, "norm_topk_prob", True),  # Qwen3.5 has no such field and always normalises
        names=ExpertNames(shared="shared_expert"),
        shared_width=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def qwen3_next(config: PretrainedConfig) -> Decoder:
    """Reads Qwen3-Next, which may have dense layers between the sparse ones."""
    return _hybrid(config, interleaved_mlps(config, _experts(config)), grouped=True)


def qwen3_5(config: PretrainedConfig) -> Decoder:
    """Reads the text part of a dense Qwen3.5."""
    return _hybrid(config, [Mlp(config.intermediate_size)] * config.num_hidden_layers, grouped=False)


def qwen3_5_moe(config: PretrainedConfig) -> Decoder:
    """Reads the text part of a Qwen3.5 mixture of experts."""
    return _hybrid(config, [_experts(config)] * config.num_hidden_layers, grouped=False)


def problem(config: PretrainedConfig) -> str:
    """Says what the actor cannot run of a config; "" if it can run it."""
    full = _full_layers(config)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"linear_attention", "full_attention"}
    if kinds:
        return f"has layer_types of {', '.join(sorted(kinds))}; supported are linear_attention and full_attention"
    if len(full) != config.num_hidden_layers:
        return f"has {len(full)} layer_types for num_hidden_layers={config.num_hidden_layers}; correct config.json"
    if all(full) or not any(full):
        return "has layers of one kind alone; supported are linear_attention and full_attention mixed"
    if not getattr(config, "attn_output_gate", True):
        return "has attn_output_gate=false; supported is attention with an output gate"
    if (gate := getattr(config, "output_gate_type", None)) not in (None, "silu", "swish"):
        return f"has output_gate_type={gate}; supported is swish"
    if config.linear_num_value_heads % config.linear_num_key_heads:
        return (
            f"has linear_num_value_heads={config.linear_num_value_heads}, which linear_num_key_heads="
            f"{config.linear_num_key_heads} does not divide; correct config.json"
        )
    return ""
