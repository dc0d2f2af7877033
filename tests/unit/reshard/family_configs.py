"""Small HF configs of every model family."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from megarl.families.deepseek import KimiK2Config

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "gemma3_text": Gemma3TextConfig,
    "gpt_oss": GptOssConfig,
    "mixtral": MixtralConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
    "deepseek_v3": DeepseekV3Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "kimi_k2": KimiK2Config,
}
LATENT = ("deepseek_v3", "glm4_moe_lite", "kimi_k2")
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 8, 4, 32, 48, 347


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """A model of one layer by default; `changes` replace fields of the config."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    if family != "qwen2":  # Qwen2 has no such field
        sizes["head_dim"] = HEAD_DIM
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "moe_intermediate_size": INTERMEDIATE // 2}
    if family in LATENT or family == "glm4_moe":
        sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": INTERMEDIATE // 2}
        sizes |= {"n_group": 1, "topk_group": 1}
    if family in LATENT:
        del sizes["head_dim"]
        sizes |= {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4}
    if family in ("deepseek_v3", "glm4_moe"):  # of the others, a single layer is dense
        sizes |= {"first_k_dense_replace": 1 if changes.get("num_hidden_layers", 1) > 1 else 0}
    if family == "glm4_moe_lite":
        sizes |= {"mlp_layer_types": ["dense"] + ["sparse"] * (changes.get("num_hidden_layers", 1) - 1)}
    if family in ("mixtral", "gpt_oss"):
        sizes |= {"num_local_experts": 4}
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        sizes |= {"num_experts": 4, "moe_intermediate_size": INTERMEDIATE // 2, "shared_expert_intermediate_size": 40}
    if family in HYBRID:
        sizes |= {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 3}
        sizes |= {"linear_value_head_dim": 5, "num_hidden_layers": 2, "full_attention_interval": 2}
    return CONFIGS[family](**(sizes | changes))
