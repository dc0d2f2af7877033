"""Tiny random checkpoints for real SGLang servers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from megarl.families.deepseek import KimiK2Config
from megarl.families.weight_formats import FORMATS, ServedFormat
from megarl.reshard.quantised_weights import quantised
from tests.latent_shapes import LATENT, SIGMOID_EXPERTS, YARN

VOCAB_SIZE = 344
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "gemma3_text": Gemma3TextConfig,
    "gpt_oss": GptOssConfig,
    "deepseek_v3": DeepseekV3Config,
    "moonlight": DeepseekV3Config,
    "kimi_k2": KimiK2Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "qwen3_next": Qwen3NextConfig,
}
WIDE_EXPERTS = {**SIGMOID_EXPERTS, "moe_intermediate_size": 96}
ROPE = {**YARN, "mscale": 1.0}
DENSE_FIRST = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **WIDE_EXPERTS,
        **LATENT,
        **DENSE_FIRST,
        "n_group": 4,
        "topk_group": 2,
        "moe_layer_freq": 1,
        "rope_parameters": ROPE,
    },
    "glm4_moe": {**WIDE_EXPERTS, **DENSE_FIRST, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {**WIDE_EXPERTS, **LATENT, **DENSE_FIRST},
    "kimi_k2": {**WIDE_EXPERTS, **LATENT, **DENSE_FIRST, "moe_layer_freq": 1, "rope_parameters": ROPE},
    "moonlight": {
        **WIDE_EXPERTS,
        **LATENT,
        **DENSE_FIRST,
        "moe_layer_freq": 1,
        "q_lora_rank": None,
        "n_shared_experts": 2,
    },
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 40,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,  # SGLang reads this one
    },
}


def make_model(family: str, tied: bool, seed: int, kv_heads: int = 2) -> torch.nn.Module:
    """A random fp32 model of `family`: 2 layers, hidden 64, 4 heads on `kv_heads` key/value heads, 344 tokens."""
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 192,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        **({} if family == "qwen2" else {"head_dim": 16}),  # Qwen2 has no such field: it is hidden / heads
        **EXPERTS.get(family, {}),
    }
    shape = {name: value for name, value in shape.items() if (name, value) != ("head_dim", None)}
    torch.manual_seed(seed)
    config = CONFIGS[family](**shape)
    if isinstance(config, KimiK2Config):  # transformers knows the class, under DeepSeek's name
        model: torch.nn.Module = DeepseekV3ForCausalLM._from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # The default initialisation is so small that a random model answers alike whatever it is asked; norms and biases
    # are constant in it, so that two of them swapped would go unseen.
    with torch.no_grad():
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
        for name, parameter in itertools.chain(model.named_parameters(), biases):
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.15 * torch.randn_like(parameter))
    return model.eval()


def save_multimodal(folder: Path) -> None:
    """Writes a Qwen3.5 mixture of experts with a vision tower, in the sizes of `make_model`."""
    sizes = {name: size for name, size in EXPERTS["qwen3_next"].items() if name != "layer_types"}
    text = Qwen3_5MoeTextConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=VOCAB_SIZE, max_position_embeddings=512, **sizes,
    )  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder, save_original_format=True)
    fields = json.loads((folder / "config.json").read_text())
    fields["text_config"]["full_attention_interval"] = 2
    (folder / "config.json").write_text(json.dumps(fields))


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 340 tokens; id 0 ends a text, id 1 pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Leo has 7 pens. Leo buys 1 more. How many pens? 7+1=8 #### 8"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>").save_pretrained(
        folder
    )


def make_wide(seed: int) -> torch.nn.Module:
    """A random Qwen3 whose parts for each of two ranks are whole blocks of FP8.

    No rank pads its vocabulary: a server that begins without weights has other rows there than one that loads them.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        intermediate_size=512, vocab_size=384, tie_word_embeddings=True, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.06 if parameter.dim() == 2 else 0.2) + (parameter.dim() == 1)
            )
    return model


def save_quantised(model: torch.nn.Module, folder: Path, format: ServedFormat = FORMATS["fp8"]) -> Path:
    """Writes the quantised checkpoint of a model."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tensors = dict(quantised(((name, p.detach()) for name, p in model.named_parameters()), format))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    name_format(folder, format)
    return folder


def name_format(folder: Path, format: ServedFormat) -> None:
    """Writes a format's entry into a checkpoint's config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(format.config)}))
