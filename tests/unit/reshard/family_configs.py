"""Small HF configs of every model family."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma3TextConfig,
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
}
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 8, 4, 32, 48, 347


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """A model of one layer by default; `changes` replace fields of the config."""
    sizes = {
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
    if family in ("mixtral", "gpt_oss"):
        sizes |= {"num_local_experts": 4}
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        sizes |= {"num_experts": 4, "moe_intermediate_size": INTERMEDIATE // 2, "shared_expert_intermediate_size": 40}
    if family in HYBRID:
        sizes |= {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 3}
        sizes |= {"linear_value_head_dim": 5, "num_hidden_layers": 2, "full_attention_interval": 2}
    return CONFIGS[family](**(sizes | changes))
