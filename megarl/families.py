"""Which HF model families the actor runs, and the checks of a checkpoint's config against them and the layout.

Imports no Megatron: the commands check a config with it before anything heavy is loaded.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.hub import local_folder
from megarl.knobs import UserError

VOCAB_MULTIPLE = 8  # rows of each rank's embedding shard are a multiple of this; the padding is never trained


@dataclass(frozen=True)
class ExpertNames:
    """How a family's checkpoints call the parts of a mixture of experts."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """What a HF `model_type` has beyond the common dense decoder."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: ExpertNames | None = None


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2")),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")),
}

ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe")  # their attention_bias adds biases before and behind attention


@dataclass(frozen=True)
class MoeShape:
    """A mixture of experts: its sizes, and which layers have one in place of a dense MLP."""

    layers: tuple[bool, ...]
    experts: int
    width: int  # of one expert's hidden layer
    topk: int  # experts that see a token
    normalized: bool  # whether the weights of a token's experts sum to 1


def read_config(path: str) -> PretrainedConfig:
    """The HF config of a checkpoint folder or hub name, checked to be one that the actor can run.

    Raises:
        UserError: see `local_folder`; an unsupported family, or a field of it that is not supported.
    """
    folder = local_folder(path)
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"actor.path={path} is a '{kind}' model; supported are {', '.join(sorted(FAMILIES))}")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"actor.path={path} has no readable HF config ({first}); save it again") from error
    _check_fields(path, config)
    return config


def _check_fields(path: str, config: PretrainedConfig) -> None:
    window, longest = getattr(config, "sliding_window", None), config.max_position_embeddings
    if window is not None and window < longest:
        raise UserError(
            f"actor.path={path} has sliding_window={window}, below max_position_embeddings={longest}: sliding-window "
            "attention is not supported; give a full-attention model"
        )
    if getattr(config, "mlp_bias", False):
        raise UserError(f"actor.path={path} has mlp_bias=true, which is not supported; use a model without MLP biases")
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
            f"actor.path={path} has num_experts_per_tok=1 and normalised weights: they are all 1 and its router "
            "cannot be trained; use more experts a token"
        )
    if getattr(config, "router_jitter_noise", 0.0):
        raise UserError(
            f"actor.path={path} has router_jitter_noise={config.router_jitter_noise}: routing must repeat itself; set "
            "it to 0 in config.json"
        )


def as_scalar(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the same model with one output in place of the vocabulary, as HF's `ForSequenceClassification`:
    a critic or a reward model, its head named `score.weight`."""
    scalar = copy.deepcopy(config)
    scalar.architectures = [f"{type(config).__name__.removesuffix('Config')}ForSequenceClassification"]
    scalar.num_labels = 1
    scalar.tie_word_embeddings = False
    return scalar


def is_scalar(config: PretrainedConfig) -> bool:
    """Whether the model gives one number a token."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def moe_shape(config: PretrainedConfig) -> MoeShape | None:
    """The mixture of experts of the model; None of a dense one."""
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
    """Whether the projections into attention have a bias, and whether the one out of it has."""
    everywhere = bool(getattr(config, "attention_bias", False)) and config.model_type in ATTENTION_BIAS
    return FAMILIES[config.model_type].qkv_bias or everywhere, everywhere


def _rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def rotary_inv_freq(config: PretrainedConfig) -> torch.Tensor:
    """Rotary frequencies `[head_dim / 2]` as transformers computes them for this config."""
    rope = _rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dim = head_dim(config)
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


def padded_vocab_size(config: PretrainedConfig, tp_size: int) -> int:
    """Rows of the embedding over all tp ranks, padding included."""
    multiple = VOCAB_MULTIPLE * tp_size
    return -(-config.vocab_size // multiple) * multiple
