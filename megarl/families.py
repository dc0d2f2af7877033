"""Supported HF model families, and the checks of a checkpoint's config.

Imports no Megatron, so commands can check a config before anything heavy is loaded.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.hub import local_folder
from megarl.knobs import UserError

SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"
)  # fmt: skip
VOCAB_MULTIPLE = 8  # each rank's embedding shard has a multiple of this many rows; padding rows are never trained


@dataclass(frozen=True)
class ExpertNames:
    """Module names of a mixture of experts in a family's checkpoints."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """Features of a HF `model_type` beyond the common dense decoder."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: ExpertNames | None = None
    sglang_ties_head: bool = True  # False: SGLang stores tied embeddings twice, as embed_tokens and as lm_head


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2"), sglang_ties_head=False),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(
        qk_norm=True,
        experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        sglang_ties_head=False,
    ),
}

ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe")  # with attention_bias, all their attention projections have biases


@dataclass(frozen=True)
class MoeShape:
    """Sizes of a mixture of experts, and the layers that have one instead of a dense MLP."""

    layers: tuple[bool, ...]  # by layer: True if it has experts
    experts: int
    width: int  # intermediate size of one expert
    topk: int  # experts per token
    normalized: bool  # True if the weights of a token's experts sum to 1


def read_config(path: str) -> PretrainedConfig:
    """Reads the HF config of a checkpoint folder or hub name, and checks that the actor can run it.

    Raises:
        UserError: see `local_folder`. Also raised for an unsupported family or an unsupported field of its config.
    """
    folder = local_folder(path)
    try:
        fields = json.loads((folder / "config.json").read_text())
        kind = fields.get("model_type")
        config = AutoConfig.from_pretrained(folder) if kind in FAMILIES else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"actor.path={path} has no readable HF config ({reason}); correct it or save it again"
        ) from error
    if config is None:
        raise UserError(f"actor.path={path} is a '{kind}' model; supported are {', '.join(sorted(FAMILIES))}")
    _check_fields(path, config)
    return config


def _check_fields(path: str, config: PretrainedConfig) -> None:
    window, max_positions = getattr(config, "sliding_window", None), config.max_position_embeddings
    if window is not None and window < max_positions:
        raise UserError(
            f"actor.path={path} has sliding_window={window}, below max_position_embeddings={max_positions}: "
            "sliding-window attention is not supported; give a full-attention model"
        )
    if getattr(config, "mlp_bias", False):
        raise UserError(f"actor.path={path} has mlp_bias=true, which is not supported; use a model without MLP biases")
    if (dropout := getattr(config, "attention_dropout", 0.0)) != 0.0:
        raise UserError(
            f"actor.path={path} has attention_dropout={dropout}, which megarl does not apply; set it to 0 in its "
            "config.json"
        )
    for name in SIZES:
        if (size := getattr(config, name)) < 1:
            raise UserError(f"actor.path={path} has {name}={size} in config.json; it must be at least 1")
    if config.hidden_act != "silu":
        raise UserError(f"actor.path={path} has hidden_act={config.hidden_act}; supported is silu")
    rope_type = _rope_parameters(config).get("rope_type", "default")
    if rope_type not in ("default", "linear", "llama3"):
        raise UserError(f"actor.path={path} has rope_type={rope_type}; supported are default, linear, llama3")
    if (moe := moe_shape(config)) is not None:
        _check_experts(path, config, moe)


def _check_experts(path: str, config: PretrainedConfig, moe: MoeShape) -> None:
    if not any(moe.layers) or moe.experts < 1:
        raise UserError(
            f"actor.path={path} is a '{config.model_type}' model with {moe.experts} experts in {sum(moe.layers)} "
            "layers; give it at least one layer of experts, or use the dense family"
        )
    if not 1 <= moe.topk <= moe.experts:
        raise UserError(f"actor.path={path} has num_experts_per_tok={moe.topk}; it must be from 1 to {moe.experts}")
    if moe.topk == 1 and moe.normalized:
        raise UserError(
            f"actor.path={path} has num_experts_per_tok=1 and normalised weights: all weights are 1, so its router "
            "gets no gradient; use more experts per token"
        )
    if getattr(config, "router_jitter_noise", 0.0):
        raise UserError(
            f"actor.path={path} has router_jitter_noise={config.router_jitter_noise}: routing must be deterministic; "
            "set it to 0 in config.json"
        )


def as_scalar(config: PretrainedConfig) -> PretrainedConfig:
    """Copies the config for a model with one output per token: a critic or a reward model.

    The result is HF's `ForSequenceClassification` with one label. Its head is named `score.weight`.
    """
    scalar = copy.deepcopy(config)
    scalar.architectures = [f"{type(config).__name__.removesuffix('Config')}ForSequenceClassification"]
    scalar.num_labels = 1
    scalar.tie_word_embeddings = False
    return scalar


def is_scalar(config: PretrainedConfig) -> bool:
    """True if the model has one output per token instead of the vocabulary."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def moe_shape(config: PretrainedConfig) -> MoeShape | None:
    """Sizes of the model's mixture of experts; None for a dense model."""
    count = config.num_hidden_layers
    if FAMILIES[config.model_type].experts is None:
        return None
    if config.model_type == "mixtral":
        return MoeShape(
            layers=(True,) * count,
            experts=config.num_local_experts,
            width=config.intermediate_size,
            topk=config.num_experts_per_tok,
            normalized=True,
        )
    dense, step = set(config.mlp_only_layers or ()), config.decoder_sparse_step
    return MoeShape(
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(count)),
        experts=config.num_experts,
        width=config.moe_intermediate_size,
        topk=config.num_experts_per_tok,
        normalized=config.norm_topk_prob,
    )


def attention_biases(config: PretrainedConfig) -> tuple[bool, bool]:
    """Biases of attention: True if the QKV projection has one, and True if the output projection has one."""
    all_projections = bool(getattr(config, "attention_bias", False)) and config.model_type in ATTENTION_BIAS
    return FAMILIES[config.model_type].qkv_bias or all_projections, all_projections


def _rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def rotary_inv_freq(config: PretrainedConfig) -> torch.Tensor:
    """Computes the rotary frequencies `[head_dim / 2]` as transformers does for this config."""
    rope = _rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dim = head_dim(config)
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


def padded_vocab_size(config: PretrainedConfig, tp_size: int) -> int:
    """Number of embedding rows over all tp ranks, padding included."""
    multiple = VOCAB_MULTIPLE * tp_size
    return -(-config.vocab_size // multiple) * multiple
