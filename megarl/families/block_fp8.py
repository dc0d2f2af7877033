"""Block FP8 as checkpoints and SGLang have it: the weights in 8 bits, their scales' names and their config's entry."""

from __future__ import annotations

import re
from typing import Any

BLOCK = 128  # rows and columns of a block
SCALE = "_scale_inv"  # after the weight's name
LINEAR = re.compile(r"(?:^|\.)(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj\.weight$")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose linear layers are all of these names


def in_fp8(name: str) -> bool:
    """True for the weights that are quantised: the linear layers of attention and MLP, neither head nor embedding."""
    return LINEAR.search(name) is not None


def is_scale(name: str) -> bool:
    """True for the name of the scales of a quantised weight."""
    return name.endswith(SCALE)


def quantization_config() -> dict[str, Any]:
    """The entry `quantization_config` of a quantised checkpoint's config.json."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    }


def is_quantised(config: Any) -> bool:
    """True if a model of this config has its linear layers in FP8 with blocks of BLOCK."""
    entry = getattr(config, "quantization_config", None) or {}
    return bool(entry.get("quant_method") == "fp8" and entry.get("weight_block_size") == [BLOCK, BLOCK])
