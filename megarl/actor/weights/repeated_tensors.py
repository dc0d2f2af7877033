"""Tensors that a checkpoint has twice: layers of multi-token prediction repeat the model's embedding and head.

A model that trains these layers has one embedding and one head for both. An export writes them under all their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from transformers import PretrainedConfig

from megarl.families import decoder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def repeated(config: PretrainedConfig) -> dict[str, str]:
    """Names that a checkpoint may have besides, each with the model's tensor that it repeats."""
    model = decoder(config)
    names = {}
    for mtp in model.mtp:
        names[mtp.embedding_copy] = EMBEDDING
        names[mtp.head_copy] = EMBEDDING if model.tied else HEAD
    names.pop("", None)
    return names


def with_repeated(tensors: Iterable[tuple[str, Tensor]], names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors, and each again under the `names` that repeat it."""
    for name, tensor in tensors:
        yield name, tensor
        for copy, original in names.items():
            if original == name:
                yield copy, tensor.clone()  # safetensors refuses shared memory
