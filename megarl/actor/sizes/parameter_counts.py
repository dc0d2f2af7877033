"""Numbers of parameters: of a model, and on each rank, held and trained. Counted from the table of shards."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from megarl.actor.weights.shard_spec import ShardSpec
from megarl.actor.weights.shards import shard_specs
from megarl.families import Adapters, decoder, with_adapters
from megarl.families.adapters import EVERY_LINEAR
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import Place


def elements(specs: list[ShardSpec]) -> int:
    """Number of elements in the shards."""
    return sum(math.prod(b - a for a, b in zip(spec.start, spec.stop, strict=True)) for spec in specs)


def count_parameters(model: PretrainedConfig) -> int:
    """Number of parameters of the model, with tied embeddings counted once."""
    whole = rank_parameters(model, ParallelConfig(), 0)
    return whole.dense + whole.experts


@dataclass(frozen=True)
class RankParameters:
    """Number of parameters on one rank: experts, and all others."""

    dense: int
    experts: int
    matrices: int  # part of `dense` in linear layers; experts have no other weights
    trained_dense: int  # all of them, or adapters
    trained_experts: int

    def spread(self, ep_size: int) -> RankParameters:
        """The counts with the experts over `ep_size` ranks."""
        return replace(self, experts=self.experts // ep_size, trained_experts=self.trained_experts // ep_size)


def rank_parameters(
    model: PretrainedConfig, parallel: ParallelConfig, pp_rank: int, adapters: Adapters | None = None
) -> RankParameters:
    """Counts the parameters of a rank with pipeline rank `pp_rank`. All experts have one size, so one is counted.

    With `adapters`, they alone are trained.
    """
    experts = decoder(model).experts
    single = parallel if experts is None else replace(parallel, ep_size=experts.count)
    place = Place(0, 0, 0, pp_rank, 0, 0, 0)
    specs = shard_specs(model, single, place)
    expert = _expert_elements(specs)
    share = 0 if experts is None else experts.count // parallel.ep_size
    linear = [spec for spec in specs if EVERY_LINEAR.adapt(spec.name, spec.shape)]
    trained = specs if adapters is None else shard_specs(with_adapters(model, adapters), single, place)
    trained_expert = _expert_elements(trained)
    return RankParameters(
        elements(specs) - expert,
        expert * share,
        elements(linear) - _expert_elements(linear),
        elements(trained) - trained_expert,
        trained_expert * share,
    )


def _expert_elements(specs: list[ShardSpec]) -> int:
    return elements([spec for spec in specs if ".experts." in spec.param])
