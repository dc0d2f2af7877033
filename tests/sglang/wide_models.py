"""Random checkpoints of models whose parts for each of two ranks are whole blocks, by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig

from megarl.actor.weights.shards import tensor_shapes
from megarl.families import load_config
from megarl.families.deepseek import KimiK2Config
from megarl.families.weight_formats import FORMATS, ServedFormat
from megarl.ops.quantize import dequantise
from megarl.reshard.quantised_weights import quantised
from tests.latent_shapes import SIGMOID_EXPERTS
from tests.sglang.tiny_models import CONFIGS, ROPE, name_format, save_tokenizer

BLOCKS = FORMATS["fp8"]
SIZES = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 384, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
SIGMOID = {
    **SIGMOID_EXPERTS, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "moe_layer_freq": 1,
}  # fmt: skip
LATENT = {  # the last block of kv_a_proj_with_mqa has 32 rows
    "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 8, "head_dim": None, "topk_method": "noaux_tc",
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 8, "head_dim": 32},
    "glm4_moe": {**SIGMOID, "attention_bias": True, "use_qk_norm": True},
    "deepseek_v3": {**SIGMOID, **LATENT, "n_group": 2, "topk_group": 1, "rope_parameters": ROPE},
    "glm4_moe_lite": {**SIGMOID, **LATENT, "rms_norm_eps": 1e-6},  # transformers' own for norms of latent vectors
    "kimi_k2": {**SIGMOID, **LATENT, "rope_parameters": ROPE},
    "moonlight": {**SIGMOID, **LATENT, "q_lora_rank": None, "n_shared_experts": 2},
}


def wide_config(family: str) -> PretrainedConfig:
    """Two layers. No rank pads its vocabulary: a server that begins without weights has other rows there."""
    fields = {name: value for name, value in (SIZES | FIELDS[family]).items() if (name, value) != ("head_dim", None)}
    return CONFIGS[family](**fields)


def wide_weights(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    """A checkpoint's tensors. A router's bias is small against its scores."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        tensor = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * tensor if "norm" in name else 0.06 * tensor
    return tensors


def dequantised(tensors: dict[str, Tensor], format: ServedFormat = BLOCKS) -> dict[str, Tensor]:
    """The weights that a quantised server computes with."""
    stored = dict(quantised(tensors.items(), format))
    return {
        name: dequantise(format, [stored[piece] for piece in format.names(name)], tensor.dtype)
        if format.quantises(name)
        else tensor
        for name, tensor in tensors.items()
    }


def save(config: PretrainedConfig, tensors: dict[str, Tensor], folder: Path) -> Path:
    """Writes a checkpoint."""
    folder.mkdir(exist_ok=True)
    config.architectures = [architecture(config)]
    config.save_pretrained(folder)
    save_tokenizer(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_quantised(
    config: PretrainedConfig, tensors: dict[str, Tensor], folder: Path, format: ServedFormat = BLOCKS
) -> Path:
    """Writes the quantised checkpoint."""
    save(config, dict(quantised(tensors.items(), format)), folder)
    name_format(folder, format)
    return folder


def architecture(config: PretrainedConfig) -> str:
    kind = DeepseekV3Config if isinstance(config, KimiK2Config) else type(config)
    return str(AutoModelForCausalLM._model_mapping[kind].__name__)


def model_of(folder: Path) -> nn.Module:
    """A checkpoint's model by transformers, in float32."""
    config = load_config(folder)
    if isinstance(config, KimiK2Config):  # transformers knows the class, under DeepSeek's name
        config = DeepseekV3Config(**{name: value for name, value in config.to_dict().items() if name != "model_type"})
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.eval()
