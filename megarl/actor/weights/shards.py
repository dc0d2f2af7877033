"""Table of shards: maps boxes of HF tensors to native parameters, for any rank of any layout.

Loading, exporting, checkpoints and resharding all use this table. It is computed from the HF config and the layout
alone, without Megatron and without a model. So it works for worlds of any size. `hf_weights.shards` binds it to live
parameters.

    shard_specs(config, parallel, place)   shards of one rank, as a list
    world_table(config, parallel)          shards of all ranks, as arrays, with replicas listed once

A shard is a box of a HF tensor, and a box of a native parameter with the same shape. Megatron's layouts are:

    linear_qkv   per query group: query heads, key head, value head; rows split evenly over tp
    linear_fc1   gate rows of this rank, then up rows of this rank
    embeddings   an equal number of rows on every tp rank; the last rows are padding and in no shard
    experts      num_experts / ep of them on each ep rank, each split over etp

Layers of multi-token prediction are a module of their own (`model/mtp.py`): one more stage of the last pipeline rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from megarl.actor.weights.adapter_shards import SCORE, adapter_shards
from megarl.actor.weights.block_shards import attention_shards, expert_shards, mlp_shards, router_shards
from megarl.actor.weights.delta_net_shards import delta_net_shards
from megarl.actor.weights.shard_spec import ShardSpec, Stage
from megarl.families import adapters_of, decoder, is_scalar, padded_vocab_size
from megarl.families.blocks import Decoder, DeltaNet, Experts, Layer, MtpLayer
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import Place, place_of, places

Ints = NDArray[np.int64]


def shard_specs(config: PretrainedConfig, parallel: ParallelConfig, place: Place) -> list[ShardSpec]:
    """Lists the shards of the rank at `place`: dense weights, then experts, each in layer order.

    A config that stands for adapters (`families/adapters.py`) gives the adapters' shards.
    """
    model = decoder(config)
    dense = _dense_specs(config, model, parallel, place.pp, place.tp)
    experts = _expert_specs(model, parallel, place.pp, place.ep, place.etp)
    return [*_adapted(config, dense), *_adapted(config, experts)]


def _adapted(config: PretrainedConfig, specs: list[ShardSpec]) -> list[ShardSpec]:
    """The shards of the adapters of these weights, if the config stands for adapters, else the weights' own."""
    adapters = adapters_of(config)
    return specs if adapters is None else list(adapter_shards(specs, adapters))


@dataclass(frozen=True, eq=False)
class WorldTable:
    """Shards of all ranks of a layout, one per row. Replicas of a shard share one row.

    A rank is in at most two sets of `holders`: one for its dense weights, then one for its experts. Its rows, in table
    order, are its `shard_specs` in their order.
    """

    names: tuple[str, ...]  # of the HF tensors
    shape: Ints  # [names, dims], of the full HF tensors; 1 for a missing dimension
    tensor: Ints  # [rows], index into `names` and `shape`
    start: Ints  # [rows, dims], in elements; 0 for a missing dimension
    stop: Ints  # [rows, dims], in elements; 1 for a missing dimension
    holder: Ints  # [rows], index into `holders`
    holders: tuple[tuple[int, ...], ...]  # sets of world ranks that all hold the rows of the set


def world_table(config: PretrainedConfig, parallel: ParallelConfig) -> WorldTable:
    """Computes the table of the world of `parallel`. 1,024 ranks of a 235B MoE take less than a second."""
    model = decoder(config)
    dense: dict[tuple[int, ...], list[int]] = {}
    experts: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places(parallel)):
        dense.setdefault((place.pp, place.tp), []).append(rank)
        if model.experts is not None:
            experts.setdefault((place.pp, place.ep, place.etp), []).append(rank)
    sets = [
        *((_adapted(config, _dense_specs(config, model, parallel, *key)), ranks) for key, ranks in dense.items()),
        *((_adapted(config, _expert_specs(model, parallel, *key)), ranks) for key, ranks in experts.items()),
    ]
    names: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    rows: list[tuple[int, ...]] = []
    counts = []
    dims = 2 if model.delta_net is None else 3  # a convolution's weight has three
    for specs, _ in sets:
        counts.append(len(specs))
        for spec in specs:
            tensor = names.setdefault(spec.name, len(names))
            if tensor == len(shapes):
                shapes.append((*spec.shape, 1, 1)[:dims])
            rows.append((tensor, *(*spec.start, 0, 0)[:dims], *(*spec.stop, 1, 1)[:dims]))
    table = np.array(rows, dtype=np.int64).reshape(-1, 1 + 2 * dims)
    return WorldTable(
        names=tuple(names),
        shape=np.array(shapes, dtype=np.int64).reshape(-1, dims),
        tensor=table[:, 0],
        start=table[:, 1 : 1 + dims],
        stop=table[:, 1 + dims :],
        holder=np.repeat(np.arange(len(sets)), counts),
        holders=tuple(tuple(ranks) for _, ranks in sets),
    )


def single_rank_specs(config: PretrainedConfig) -> list[ShardSpec]:
    """Lists the shards of a rank that holds the whole model."""
    alone = ParallelConfig()
    return shard_specs(config, alone, place_of(alone, 0))


def tensor_specs(config: PretrainedConfig) -> dict[str, ShardSpec]:
    """A shard of each of the model's HF tensors on a single rank, by name, in the order of an export."""
    return {spec.name: spec for spec in single_rank_specs(config)}


def tensor_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's HF tensors, in the order of an export."""
    return {name: spec.shape for name, spec in tensor_specs(config).items()}


def float32_tensors(config: PretrainedConfig) -> set[str]:
    """Names of HF tensors whose parameters are float32 in bfloat16 models too."""
    return {name for name, spec in tensor_specs(config).items() if spec.float32}


def _dense_specs(
    config: PretrainedConfig, model: Decoder, parallel: ParallelConfig, pp: int, tp: int
) -> list[ShardSpec]:
    """Lists the shards of tensor-parallel rank `tp` of pipeline rank `pp`, without experts."""
    sizes = (model.vocab, padded_vocab_size(config, parallel.tp_size), model.hidden)
    result: list[ShardSpec] = []
    stages = parallel.stage_layers(len(model.layers))[pp]
    for number, layers in enumerate(stages):
        stage = Stage(number, tp, parallel.tp_size)
        embeds = pp == 0 and number == 0
        if embeds:
            result += stage.vocabulary("model.embed_tokens.weight", "embedding.word_embeddings.weight", *sizes)
        for local, layer in enumerate(layers):
            prefix, native = f"model.layers.{layer}", f"decoder.layers.{local}"
            result += _layer_specs(model.layers[layer], model.hidden, stage, prefix, native)
        if pp == parallel.pp_size - 1 and number == len(stages) - 1:
            result.append(stage.replicated("model.norm.weight", "decoder.final_layernorm.weight", model.hidden))
            if is_scalar(config):
                result.append(stage.replicated(SCORE, "output_layer.weight", 1, model.hidden))
            elif not model.tied:
                result += stage.vocabulary("lm_head.weight", "output_layer.weight", *sizes)
            elif not embeds:  # the last stage holds a copy of the tied embedding
                result += stage.vocabulary("model.embed_tokens.weight", "output_layer.weight", *sizes)
    if pp == parallel.pp_size - 1:
        stage = Stage(len(stages), tp, parallel.tp_size)
        for depth, mtp in enumerate(model.mtp):
            result += _mtp_specs(mtp, model.hidden, stage, f"layers.{depth}")
    return result


def _mtp_specs(mtp: MtpLayer, hidden: int, stage: Stage, native: str) -> Iterator[ShardSpec]:
    """Yields the shards of one layer of multi-token prediction, without experts."""
    yield stage.replicated(f"{mtp.embedding_norm}.weight", f"{native}.enorm.weight", hidden)
    yield stage.replicated(f"{mtp.hidden_norm}.weight", f"{native}.hnorm.weight", hidden)
    yield stage.share_of_rows(f"{mtp.projection}.weight", f"{native}.eh_proj.weight", hidden, 2 * hidden)
    yield from _layer_specs(mtp.layer, hidden, stage, mtp.prefix, f"{native}.layer")
    yield stage.replicated(f"{mtp.final_norm}.weight", f"{native}.final_layernorm.weight", hidden)


def _layer_specs(layer: Layer, hidden: int, stage: Stage, prefix: str, native: str) -> Iterator[ShardSpec]:
    """Yields the shards of one layer, without experts."""
    yield stage.replicated(f"{prefix}.input_layernorm.weight", f"{native}.input_layernorm.weight", hidden)
    if isinstance(layer.attention, DeltaNet):
        yield from delta_net_shards(stage, layer.attention, hidden, f"{prefix}.linear_attn", f"{native}.self_attention")
    else:
        yield from attention_shards(stage, layer.attention, hidden, f"{prefix}.self_attn", f"{native}.self_attention")
    before_mlp = "pre_feedforward_layernorm" if layer.sandwich else "post_attention_layernorm"
    yield stage.replicated(f"{prefix}.{before_mlp}.weight", f"{native}.pre_mlp_layernorm.weight", hidden)
    if layer.sandwich:
        for norm, param in (("attention", "attention"), ("feedforward", "mlp")):
            name = f"{prefix}.post_{norm}_layernorm.weight"
            yield stage.replicated(name, f"{native}.post_{param}_layernorm.weight", hidden)
    if isinstance(layer.mlp, Experts):
        yield from router_shards(stage, layer.mlp, hidden, prefix, f"{native}.mlp")
    else:
        yield from mlp_shards(stage, layer.mlp, hidden, f"{prefix}.mlp", f"{native}.mlp")


def _expert_specs(model: Decoder, parallel: ParallelConfig, pp: int, ep: int, etp: int) -> list[ShardSpec]:
    """Lists the expert shards of expert-parallel rank `ep` and expert tensor-parallel rank `etp`."""
    stages = parallel.stage_layers(len(model.layers))[pp]
    blocks = [
        (number, model.layers[layer].mlp, f"model.layers.{layer}", f"decoder.layers.{local}.mlp")
        for number, layers in enumerate(stages)
        for local, layer in enumerate(layers)
    ]
    if pp == parallel.pp_size - 1:
        blocks += [
            (len(stages), mtp.layer.mlp, mtp.prefix, f"layers.{depth}.layer.mlp") for depth, mtp in enumerate(model.mtp)
        ]
    result: list[ShardSpec] = []
    for number, block, prefix, native in blocks:
        if isinstance(block, Experts):
            stage, count = Stage(number, etp, parallel.expert_tp_size), block.count // parallel.ep_size
            owned = range(ep * count, (ep + 1) * count)
            result += expert_shards(stage, block, model.hidden, prefix, native, owned)
    return result
