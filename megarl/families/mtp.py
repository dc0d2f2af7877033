"""Layers of multi-token prediction in checkpoints, and the mark of a config whose model trains them.

Kinds differ by the names of tensors. DeepSeek's and GLM's are numbered after the decoder's layers and repeat its
embedding and head. Qwen's stand under `mtp.`.
"""

from __future__ import annotations

import copy

from transformers import PretrainedConfig

from megarl.families.blocks import Decoder, Layer, MtpLayer

MARK = "trained_mtp"  # attribute of a config; no config.json has it


def with_mtp(config: PretrainedConfig) -> PretrainedConfig:
    """Copies the config for a model that trains its layers of multi-token prediction."""
    marked = copy.deepcopy(config)
    setattr(marked, MARK, True)
    return marked


def without_mtp(config: PretrainedConfig) -> PretrainedConfig:
    """Copies the config for the model alone, as rollout servers load it; returns one without the mark as it is."""
    if not trains_mtp(config):
        return config
    plain = copy.deepcopy(config)
    delattr(plain, MARK)
    return plain


def trains_mtp(config: PretrainedConfig) -> bool:
    """True if the model trains its layers of multi-token prediction."""
    return bool(getattr(config, MARK, False))


def numbered(config: PretrainedConfig, model: Decoder) -> tuple[MtpLayer, ...]:
    """Reads the layers of DeepSeek-V3 and GLM, which have experts."""
    first, count = len(model.layers), getattr(config, "num_nextn_predict_layers", None) or 0
    return tuple(_numbered(f"model.layers.{i}", model) for i in range(first, first + count))


def _numbered(prefix: str, model: Decoder) -> MtpLayer:
    return MtpLayer(
        _last_kind(model),
        prefix,
        embedding_norm=f"{prefix}.enorm",
        hidden_norm=f"{prefix}.hnorm",
        projection=f"{prefix}.eh_proj",
        final_norm=f"{prefix}.shared_head.norm",
        embedding_copy=f"{prefix}.embed_tokens.weight",
        head_copy=f"{prefix}.shared_head.head.weight",
    )


def under_mtp(config: PretrainedConfig, model: Decoder) -> tuple[MtpLayer, ...]:
    """Reads the layer of Qwen3-Next, whose config does not count it, or of Qwen3.5. It has attention."""
    if not getattr(config, "mtp_num_hidden_layers", 1):
        return ()
    return (
        MtpLayer(
            _last_kind(model),
            "mtp.layers.0",
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            projection="mtp.fc",
            final_norm="mtp.norm",
        ),
    )


def _last_kind(model: Decoder) -> Layer:
    """The decoder's kind of attention, with experts where it has some."""
    mlp = model.experts or model.mlp
    assert mlp is not None
    return Layer(model.attention, mlp)
