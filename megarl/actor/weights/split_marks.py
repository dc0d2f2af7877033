"""Checks Megatron's tensor-parallel marks, by which gradient norms count every gradient exactly once.

Megatron counts a parameter on every tp rank if it bears the mark `tensor_model_parallel`, else on tp rank 0 alone
(tensor_parallel/layers.py:95). A split parameter without the mark is counted too little, a replicated one with it tp
times. The loss shows neither; clipping follows the wrong norm. `docs/layout_audit.md` has the cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import PretrainedConfig

from megarl.actor.weights import hf_weights
from megarl.actor.weights.block_shards import is_buffer
from megarl.actor.weights.shard_spec import ShardSpec
from megarl.actor.weights.shards import shard_specs
from megarl.parallel.groups import Groups
from megarl.parallel.placement import place_of


def check_split_marks(modules: Sequence[GPTModel], config: PretrainedConfig, groups: Groups) -> None:
    """Compares each parameter's mark with what its neighbour in the tensor-parallel group holds.

    With etp 1, experts may bear the mark: their gradients are sharded over their own replicas, and each rank counts
    its part.

    Raises:
        RuntimeError: a parameter is split over tensor-parallel ranks and has no mark, or is replicated and has one.
    """
    if groups.tp_size == 1 and groups.etp_size == 1:
        return
    own, neighbour = _specs(config, groups, 0), _specs(config, groups, 1)
    named = [dict(module.named_parameters()) for module in modules]
    for key in dict.fromkeys([*own, *neighbour]):
        specs = own[key] or neighbour[key]
        if is_buffer(specs[0].name):
            continue  # without a gradient
        name, param = hf_weights.native(named[specs[0].stage], specs[0])
        is_split = _boxes(own[key]) != _boxes(neighbour[key])
        is_marked = bool(getattr(param, "tensor_model_parallel", False))
        if is_split and not is_marked:
            raise RuntimeError(
                f"{name} is split over tensor parallel ranks without Megatron's mark, so gradient norms miss the other "
                "ranks' parts; call set_tensor_model_parallel_attributes where it is created"
            )
        ranks = groups.tp_size if getattr(param, "allreduce", True) else groups.etp_size
        if is_marked and not is_split and ranks > 1:
            raise RuntimeError(
                f"{name} is replicated over {ranks} tensor parallel ranks but has Megatron's mark of split parameters, "
                "so gradient norms count it on each; set tensor_model_parallel to False where it is created"
            )


def _specs(config: PretrainedConfig, groups: Groups, shift: int) -> defaultdict[tuple[int, str], list[ShardSpec]]:
    """Shards by stage and parameter, of the rank `shift` further in the tp and etp groups."""
    place = place_of(groups.layout, groups.rank)
    tp, etp = (place.tp + shift) % groups.tp_size, (place.etp + shift) % groups.etp_size
    result = defaultdict(list)
    for spec in shard_specs(config, groups.layout, place._replace(tp=tp, etp=etp)):
        result[spec.stage, spec.param].append(spec)
    return result


def _boxes(specs: list[ShardSpec]) -> list[tuple[object, ...]]:
    return [(spec.name, spec.start, spec.stop) for spec in specs]
