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
    Qwen3Config,
    Qwen3MoeConfig,
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
}
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
    return CONFIGS[family](**(sizes | changes))
