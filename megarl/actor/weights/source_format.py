"""Formats of HF checkpoints beside the plain one: text parts of multimodal models, and experts stacked in one tensor.

The table of shards has plain names, such as `model.layers.0.mlp.experts.3.up_proj.weight`. Multimodal checkpoints have
`model.language_model.` in place of `model.`. Stacked experts are `experts.gate_up_proj [experts, 2 * width, hidden]`,
gate rows first, and `experts.down_proj [experts, hidden, width]`. An export has the format of its source.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.weights.joined_tensors import TensorPart, joined
from megarl.families import CONTAINERS, FAMILIES, carried_prefixes, decoder, is_scalar, without_adapters, without_mtp

PLAIN, NESTED = "model.", "model.language_model."
INDEX = "model.safetensors.index.json"
DROPPED = ("full_attention_interval",)  # fields that transformers reads and does not write, and SGLang needs
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
STACKED = re.compile(r"(model\.layers\.|mtp\.).+\.experts\.(gate_up_proj|down_proj)$")


def plain_name(name: str) -> str:
    """Name in the table of shards of a tensor of any checkpoint."""
    return PLAIN + name.removeprefix(NESTED) if name.startswith(NESTED) else name


def config_fields(folder: Path) -> dict[str, Any]:
    """Fields of the folder's config.json; none if it has no such file."""
    file = folder / "config.json"
    fields: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return fields


def _is_nested(config: PretrainedConfig, source: Path) -> bool:
    """True if exports are multimodal checkpoints as their source is; a scalar model has no such class."""
    return config_fields(source).get("model_type") in CONTAINERS and not is_scalar(config)


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors of a checkpoint, as they are stored; none without weights. Reads no tensor."""
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text())["weight_map"])
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def _stacked_parts(config: PretrainedConfig, source: Path) -> tuple[str, ...]:
    """Prefixes under which exports stack experts: the source's own, or all if the source has no weights.

    Only some families stack. Layers of multi-token prediction may differ from the decoder's.
    """
    if not FAMILIES[config.model_type].stacked_experts:
        return ()
    names = stored_names(source)
    if not names:
        return ("model.layers.", "mtp.")
    return tuple({match[1] for name in names if (match := STACKED.match(plain_name(name)))})


def restored(
    tensors: Iterable[tuple[str, Tensor]], config: PretrainedConfig, source: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors under their names and in their shapes in the format of `source`."""
    nested, carried = _is_nested(config, source), carried_prefixes(config)
    parts = _stacked_parts(config, source)
    for name, tensor in _stacked(tensors, config, parts) if parts else tensors:
        if nested and name.startswith(PLAIN) and not name.startswith(carried):
            yield NESTED + name.removeprefix(PLAIN), tensor
        else:
            yield name, tensor


def _stacked(
    tensors: Iterable[tuple[str, Tensor]], config: PretrainedConfig, parts: tuple[str, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Stacks the experts of a layer under `parts`, which must come together. One layer's are in memory at a time."""
    experts = decoder(config).experts
    assert experts is not None
    count = experts.count

    def part_of(name: str, tensor: Tensor) -> TensorPart | None:
        match = EXPERT.match(name)
        if match is None or not name.startswith(parts):
            return None
        prefix, expert, part = match.groups()
        stacked, turns = ("down_proj", 1) if part == "down_proj" else ("gate_up_proj", 2)
        rows, columns = tensor.shape
        first = rows if part == "up_proj" else 0
        index = (int(expert), slice(first, first + rows))
        return TensorPart(f"{prefix}.{stacked}", (count, turns * rows, columns), index, tensor, count * turns)

    return joined(tensors, part_of)


def write_config(folder: Path, config: PretrainedConfig, source: Path) -> None:
    """Writes config.json. That of a multimodal model is the source's, with the dtype of the weights.

    Weights are written in 16 or 32 bits, so no config says how they were quantised.
    """
    fields, config = config_fields(source), copy.copy(without_adapters(without_mtp(config)))
    for quantised in (fields, vars(config)):
        quantised.pop("quantization_config", None)
    if not _is_nested(config, source):
        config.save_pretrained(folder)
        if missing := {name: fields[name] for name in DROPPED if name in fields}:
            written = {**missing, **config_fields(folder)}
            (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
        return
    dtype = str(config.dtype).removeprefix("torch.")
    for part in (fields, fields["text_config"]):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = dtype
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
