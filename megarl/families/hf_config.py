"""Reads and checks the HF config of a checkpoint, before anything heavy is loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from megarl.families.blocks import Experts, LatentAttention
from megarl.families.deepseek import KimiK2Config
from megarl.families.mtp import without_mtp
from megarl.families.registry import CONTAINERS, FAMILIES, REFUSED, decoder
from megarl.families.rotary import ROPE_TYPES, rope_parameters
from megarl.hub import local_folder
from megarl.knobs import UserError

SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"
)  # fmt: skip
VOCAB_MULTIPLE = 8  # each rank's embedding shard has a multiple of this many rows; padding rows are never trained


def load_config(folder: Path) -> PretrainedConfig:
    """Loads the HF config of a folder; of a multimodal model, that of its text part. Checks nothing.

    The whole model's config says whether the head is tied, as in transformers.
    """
    if json.loads((folder / "config.json").read_text()).get("model_type") == KimiK2Config.model_type:
        return KimiK2Config.from_pretrained(folder)
    return text_part(AutoConfig.from_pretrained(folder))


def read_config(path: str) -> PretrainedConfig:
    """Reads the HF config of a checkpoint folder or hub name, and checks that the actor can run it.

    Raises:
        UserError: see `local_folder`. Also raised for an unsupported family or an unsupported field of its config.
    """
    folder = local_folder(path)
    try:
        fields = json.loads((folder / "config.json").read_text())
        kind = fields.get("model_type")
        config = load_config(folder) if kind in FAMILIES or kind in CONTAINERS else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"actor.path={path} has no readable HF config ({reason}); correct it or save it again"
        ) from error
    if config is None:
        trait = f", which has {REFUSED[kind]}: not supported" if kind in REFUSED else ""
        supported = ", ".join(sorted([*FAMILIES, *CONTAINERS]))
        raise UserError(f"actor.path={path} is a '{kind}' model{trait}; supported are {supported}")
    _check_fields(path, config)
    return config


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of a multimodal model's text part, without `architectures`; any other config as it is."""
    if config.model_type not in CONTAINERS:
        return config
    text = copy.copy(config.text_config)
    text.tie_word_embeddings = bool(config.tie_word_embeddings)
    text.architectures = None
    if hasattr(config, "quantization_config"):
        text.quantization_config = config.quantization_config
    return text


def _check_fields(path: str, config: PretrainedConfig) -> None:
    if (window := getattr(config, "sliding_window", None)) is not None and window < 1:
        raise UserError(f"actor.path={path} has sliding_window={window}; it must be at least 1, or null")
    if getattr(config, "mlp_bias", False):
        raise UserError(f"actor.path={path} has mlp_bias=true, which is not supported; use a model without MLP biases")
    if (dropout := getattr(config, "attention_dropout", 0.0)) != 0.0:
        raise UserError(
            f"actor.path={path} has attention_dropout={dropout}, which megarl does not apply; set it to 0 in its "
            "config.json"
        )
    for name in SIZES:
        if (size := getattr(config, name, 1)) < 1:  # models whose layers all have experts may lack one
            raise UserError(f"actor.path={path} has {name}={size} in config.json; it must be at least 1")
    _check_quantisation(path, config)
    for field, required in FAMILIES[config.model_type].fields.items():
        if (value := getattr(config, field, None)) != required:
            text = "null" if required is None else str(required).lower()
            raise UserError(f"actor.path={path} has {field}={value}; supported is {text}")
    for rope in rope_parameters(config):
        if (rope_type := rope.get("rope_type", "default")) not in ROPE_TYPES:
            raise UserError(f"actor.path={path} has rope_type={rope_type}; supported are {', '.join(ROPE_TYPES)}")
    if problem := FAMILIES[config.model_type].problem(config):
        raise UserError(f"actor.path={path} {problem}")
    if FAMILIES[config.model_type].experts:
        _check_experts(path, config)


def _check_quantisation(path: str, config: PretrainedConfig) -> None:
    """Refuses quantised weights that are not read (`weights/mxfp4.py`, `weights/block_fp8.py`)."""
    method = quantisation(config)
    if method not in ("", FAMILIES[config.model_type].quantisation):
        raise UserError(
            f"actor.path={path} has weights quantised by '{method}', which are not read; give a checkpoint in bfloat16"
        )
    if method != "fp8":
        return
    stored = config.quantization_config
    block = stored.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise UserError(
            f"actor.path={path} has weights in FP8 and weight_block_size={block} in config.json; supported are blocks "
            "of [rows, columns], such as [128, 128]: give a checkpoint in bfloat16"
        )
    for name, supported in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if (value := stored.get(name, supported)) != supported:
            raise UserError(
                f"actor.path={path} has weights in FP8 with {name}={value}; supported is {supported}: give a "
                "checkpoint in bfloat16"
            )


def quantisation(config: PretrainedConfig) -> str:
    """Name of the method that quantised the checkpoint's weights; empty for plain weights."""
    stored = getattr(config, "quantization_config", None)
    return "" if stored is None else str(stored.get("quant_method", "unknown"))


def _check_experts(path: str, config: PretrainedConfig) -> None:
    shape = decoder(config)
    moe = shape.experts
    if moe is None or moe.count < 1:
        count = config.num_experts if moe is None else moe.count
        raise UserError(
            f"actor.path={path} is a '{config.model_type}' model with {count} experts in {sum(shape.sparse)} layers; "
            "give it at least one layer of experts, or use the dense family"
        )
    if not 1 <= moe.topk <= moe.count:
        raise UserError(f"actor.path={path} has num_experts_per_tok={moe.topk}; it must be from 1 to {moe.count}")
    if moe.topk == 1 and moe.normalized:
        raise UserError(
            f"actor.path={path} has num_experts_per_tok=1 and normalised weights: all weights are 1, so its router "
            "gets no gradient; use more experts per token"
        )
    if moe.score == "sigmoid":
        _check_sigmoid_router(path, config, moe)
    if getattr(config, "router_jitter_noise", 0.0):
        raise UserError(
            f"actor.path={path} has router_jitter_noise={config.router_jitter_noise}: routing must be deterministic; "
            "set it to 0 in config.json"
        )


def _check_sigmoid_router(path: str, config: PretrainedConfig, moe: Experts) -> None:
    """Refuses traits of DeepSeek's relatives that Megatron's router and the latent attention here lack."""
    kind = f"actor.path={path} is a '{config.model_type}' model with"
    for name, supported in (
        ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1), ("rope_interleave", True),
        ("norm_topk_prob", True),
    ):  # fmt: skip
        if (value := getattr(config, name, supported)) != supported:
            raise UserError(f"{kind} {name}={value}; supported is {supported}: use another model")
    rope = rope_parameters(config)[0]
    if rope.get("rope_type") == "yarn" and rope.get("partial_rotary_factor", 1.0) < 1.0:
        raise UserError(f"{kind} rope_type=yarn and heads rotated in part; supported is default: use another model")
    if isinstance(decoder(config).attention, LatentAttention) and config.attention_bias:
        raise UserError(f"{kind} attention_bias=true; latent attention has no biases here: use another model")
    if moe.count % moe.groups or not 1 <= moe.topk_groups <= moe.groups:
        raise UserError(
            f"{kind} n_group={moe.groups} and topk_group={moe.topk_groups}: the groups must divide {moe.count} "
            "experts, and topk_group be from 1 to n_group; correct its config.json"
        )
    # A group's score is the sum of its two best experts, and Megatron's that of topk / topk_group (moe_utils.py:658).
    if 1 < moe.groups != moe.topk_groups and moe.topk != 2 * moe.topk_groups:
        raise UserError(
            f"{kind} num_experts_per_tok={moe.topk} and topk_group={moe.topk_groups}; supported are twice as many "
            "experts as groups: use another model"
        )


def as_scalar(config: PretrainedConfig) -> PretrainedConfig:
    """Copies the config for a model with one output per token: a critic or a reward model.

    The result is HF's `ForSequenceClassification` with one label. Its head is named `score.weight`.
    """
    scalar = copy.deepcopy(without_mtp(config))
    scalar.architectures = [f"{type(config).__name__.removesuffix('Config')}ForSequenceClassification"]
    scalar.num_labels = 1
    scalar.tie_word_embeddings = False
    return scalar


def is_scalar(config: PretrainedConfig) -> bool:
    """True if the model has one output per token instead of the vocabulary."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def carried_prefixes(config: PretrainedConfig) -> tuple[str, ...]:
    """Prefixes of tensors that a checkpoint may have besides the model's own: MTP layers, and parts for images.

    MTP layers may be numbered after the decoder's. With actor.mtp=carry the actor does not run them; an export copies
    them from the source.
    """
    first = config.num_hidden_layers
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    numbered = tuple(f"model.layers.{i}." for i in range(first, first + count))
    return numbered + FAMILIES[config.model_type].carried


def padded_vocab_size(config: PretrainedConfig, tp_size: int) -> int:
    """Number of embedding rows over all tp ranks, padding included."""
    multiple = VOCAB_MULTIPLE * tp_size
    return -(-config.vocab_size // multiple) * multiple
