"""Computes the memory of a rollout server's rank from the configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.actor.sizes.memory import ITEM_BYTES
from megarl.actor.sizes.parameter_counts import rank_parameters
from megarl.families import decoder, without_mtp
from megarl.families.weight_formats import ServedFormat
from megarl.parallel.config import ParallelConfig


@dataclass(frozen=True)
class ServerMemory:
    """Bytes of one rank of a rollout server."""

    weights: int
    kv_cache: int
    adapters: int = 0  # slots of SGLang's pool
    staging: int = 0  # buffers of weight syncs
    copies: int = 0  # plain ones of rearranged layers, during a sync; not in `total`

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.adapters + self.staging


def server_memory(
    model: PretrainedConfig, tp_size: int, dtype: str, cache_tokens: int,
    format: ServedFormat | None = None, cache_bytes: int = 0,
) -> ServerMemory:  # fmt: skip
    """Computes the memory of a rollout server's rank. Linear layers in a `format` take its bytes."""
    item = ITEM_BYTES[dtype]
    parameters = rank_parameters(without_mtp(model), ParallelConfig(tp_size=tp_size), 0)
    weights = (parameters.dense + parameters.experts) * item
    if format is not None:
        weights -= math.floor((parameters.matrices + parameters.experts) * (item - format.weight_bytes))
    copies = math.ceil(parameters.matrices * format.weight_bytes) if format is not None and format.tile_rows > 1 else 0
    return ServerMemory(weights, cache_tokens * cache_token_bytes(model, tp_size, dtype, cache_bytes), copies=copies)


def cache_token_bytes(model: PretrainedConfig, tp_size: int, dtype: str, cache_bytes: int = 0) -> int:
    """Bytes of a token in the KV cache of a server's rank. KV heads are replicated if tp exceeds their number.

    A number in the cache takes `cache_bytes`; 0: as many as `dtype` has.
    """
    cached = sum(layer.attention.cached_elements(tp_size) for layer in decoder(model).layers)
    return cached * (cache_bytes or ITEM_BYTES[dtype])
