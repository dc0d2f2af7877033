"""Bytes per token that adapters (`model/adapters.py`) keep for backward."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.actor.config import LoraConfig
from megarl.actor.weights.adapter_shards import adapted_parts, shape_of
from megarl.actor.weights.shards import tensor_specs
from megarl.families import decoder

# Modules whose input another module keeps already: the latent projection of queries, or the router.
SHARED_INPUTS = (".linear_kv_down_proj", ".shared_experts.linear_fc1")


@dataclass(frozen=True)
class AdapterBytes:
    """Bytes per token, the mean over the model's layers."""

    attention: float
    mlp: float

    @property
    def total(self) -> float:
        return self.attention + self.mlp


def adapter_bytes(model: PretrainedConfig, lora: LoraConfig, item: int) -> AdapterBytes:
    """Counts what adapters keep beside the layer: `x A^T` of each, and with dropout each module's mask of its input.

    A mask has a byte an element. A module whose input others read as well keeps a copy with elements dropped.
    """
    adapters, shape = shape_of(lora), decoder(model)
    assert adapters is not None, "a rank above 0"
    parts = adapted_parts(tensor_specs(model).values(), adapters)
    experts = shape.experts
    share = 0.0 if experts is None else experts.topk / experts.count  # of all tokens, that one expert gets
    kept: dict[bool, float] = {True: 0.0, False: 0.0}  # bytes a token; True: attention, False: the rest
    modules: dict[str, tuple[float, int]] = {}
    for part in parts:
        tokens = share if ".experts." in part.module else 1.0
        kept[".self_attention." in part.module] += tokens * lora.rank * item
        modules[part.module] = (tokens, part.boxes[0].shape[1])
    if lora.dropout:
        for module, (tokens, width) in modules.items():
            copied = item if module.endswith(SHARED_INPUTS) else 0
            kept[".self_attention." in module] += tokens * width * (1 + copied)
    return AdapterBytes(kept[True] / len(shape.layers), kept[False] / len(shape.layers))
