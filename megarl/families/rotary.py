"""Rotary positions, computed as transformers does for a config."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")  # rows of the table, where layers differ in their positions


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head; transformers' default is `hidden_size / num_attention_heads`."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Lists the rope parameters of the config: one for all layers, or one for each of `LAYER_TYPES`."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope[kind] for kind in LAYER_TYPES] if set(LAYER_TYPES) <= set(rope) else [rope]


def rotary_inv_freq(config: PretrainedConfig) -> torch.Tensor:
    """Computes the rotary frequencies `[rotary dim / 2]`, or `[layer types, rotary dim / 2]` where layers differ."""
    parameters = rope_parameters(config)
    tables = [_table(config, rope, None if len(parameters) == 1 else kind)[0] for rope, kind in _kinds(parameters)]
    return tables[0] if len(tables) == 1 else torch.stack(tables)


def scores_factor(config: PretrainedConfig) -> float:
    """Factor of attention's scores by YaRN, 1 without it: the square of the factor on cosines and sines.

    Every element of queries and keys rotates, so the factor may stand before the softmax. Megatron's fused kernel for
    packed sequences leaves it out (rope_utils.py:318).
    """
    parameters = rope_parameters(config)
    if len(parameters) > 1 or parameters[0].get("rope_type", "default") == "default":
        return 1.0
    return _table(config, parameters[0], None)[1] ** 2


def _kinds(parameters: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    return list(zip(parameters, LAYER_TYPES, strict=False))


def _table(config: PretrainedConfig, rope: dict[str, Any], layer_type: str | None) -> tuple[torch.Tensor, float]:
    """Computes frequencies `[head_dim / 2]`, and the factor on cosines and sines."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dim = int(head_dim(config) * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    table, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    return table, float(factor)
