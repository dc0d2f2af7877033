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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from megarl.families import FAMILIES, attention_biases, head_dim, is_scalar, moe_shape, padded_vocab_size
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import Place, places

Ints = NDArray[np.int64]

SCORE = "score.weight"  # the value head


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A shard: the box `[start, stop)` of a HF tensor, stored in a native parameter from index `at` on.

    `shape`, `start`, `stop` and `at` are in elements, with one entry per dimension of the tensor.
    """

    name: str  # of the HF tensor
    shape: tuple[int, ...]  # of the full HF tensor
    start: tuple[int, ...]
    stop: tuple[int, ...]
    stage: int  # virtual pipeline stage on the rank
    param: str  # parameter's name in the stage's module, under Megatron's local layer spec
    at: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """Slices of the shard in its native parameter."""
        return tuple(slice(p, p + b - a) for p, a, b in zip(self.at, self.start, self.stop, strict=True))


def shard_specs(config: PretrainedConfig, parallel: ParallelConfig, place: Place) -> list[ShardSpec]:
    """Lists the shards of the rank at `place`: dense weights, then experts, each in layer order."""
    dense = _dense_specs(config, parallel, place.pp, place.tp)
    return [*dense, *_expert_specs(config, parallel, place.pp, place.ep, place.etp)]


@dataclass(frozen=True, eq=False)
class WorldTable:
    """Shards of all ranks of a layout, one per row. Replicas of a shard share one row.

    A rank is in at most two sets of `holders`: one for its dense weights, then one for its experts. Its rows, in table
    order, are its `shard_specs` in their order.
    """

    names: tuple[str, ...]  # of the HF tensors
    shape: Ints  # [names, 2], of the full HF tensors; 1 for a missing dimension
    tensor: Ints  # [rows], index into `names` and `shape`
    start: Ints  # [rows, 2], in elements; 0 for a missing dimension
    stop: Ints  # [rows, 2], in elements; 1 for a missing dimension
    holder: Ints  # [rows], index into `holders`
    holders: tuple[tuple[int, ...], ...]  # sets of world ranks that all hold the rows of the set


def world_table(config: PretrainedConfig, parallel: ParallelConfig) -> WorldTable:
    """Computes the table of the world of `parallel`. 1,024 ranks of a 235B MoE take less than a second."""
    dense: dict[tuple[int, ...], list[int]] = {}
    experts: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places(parallel)):
        dense.setdefault((place.pp, place.tp), []).append(rank)
        if moe_shape(config) is not None:
            experts.setdefault((place.pp, place.ep, place.etp), []).append(rank)
    sets = [
        *((_dense_specs(config, parallel, *key), ranks) for key, ranks in dense.items()),
        *((_expert_specs(config, parallel, *key), ranks) for key, ranks in experts.items()),
    ]
    names: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    rows: list[tuple[int, ...]] = []
    counts = []
    for specs, _ in sets:
        counts.append(len(specs))
        for spec in specs:
            tensor = names.setdefault(spec.name, len(names))
            if tensor == len(shapes):
                shapes.append((*spec.shape, 1)[:2])
            rows.append((tensor, *(*spec.start, 0)[:2], *(*spec.stop, 1)[:2]))
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return WorldTable(
        names=tuple(names),
        shape=np.array(shapes, dtype=np.int64).reshape(-1, 2),
        tensor=table[:, 0],
        start=table[:, 1:3],
        stop=table[:, 3:5],
        holder=np.repeat(np.arange(len(sets)), counts),
        holders=tuple(tuple(ranks) for _, ranks in sets),
    )


def tensor_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's HF tensors, in the order of an export."""
    return {spec.name: spec.shape for spec in shard_specs(config, ParallelConfig(), Place(0, 0, 0, 0, 0, 0, 0))}


class _Stage:
    """Builds the shards of one virtual stage, on tensor-parallel rank `rank` of `size`."""

    def __init__(self, stage: int, rank: int, size: int) -> None:
        self.stage, self.rank, self.size = stage, rank, size

    def rows(self, name: str, param: str, shape: tuple[int, ...], first: int, count: int, at: int = 0) -> ShardSpec:
        """Shard of rows `[first, first + count)` of the HF tensor, from row `at` of the parameter on."""
        zeros = (0,) * (len(shape) - 1)
        return ShardSpec(name, shape, (first, *zeros), (first + count, *shape[1:]), self.stage, param, (at, *zeros))

    def replicated(self, name: str, param: str, *shape: int) -> ShardSpec:
        """Shard of the full tensor, replicated on every rank."""
        return self.rows(name, param, shape, 0, shape[0])

    def columns(self, name: str, param: str, height: int, width: int) -> ShardSpec:
        """Shard of the rank's equal share of the columns."""
        share = width // self.size
        first = self.rank * share
        return ShardSpec(name, (height, width), (0, first), (height, first + share), self.stage, param, (0, 0))

    def gated(self, names: tuple[str, str], param: str, height: int, width: int) -> Iterator[ShardSpec]:
        """Yields the shards of the rank's gate rows, then of its up rows."""
        share = height // self.size
        for i, name in enumerate(names):
            yield self.rows(name, param, (height, width), self.rank * share, share, at=i * share)

    def vocabulary(self, config: PretrainedConfig, name: str, param: str) -> Iterator[ShardSpec]:
        """Yields the shard of the rank's rows of the vocabulary, unless they are all padding."""
        share = padded_vocab_size(config, self.size) // self.size
        first = self.rank * share
        if first < config.vocab_size:
            count = min(share, config.vocab_size - first)
            yield self.rows(name, param, (config.vocab_size, config.hidden_size), first, count)

    def qkv(self, config: PretrainedConfig, prefix: str, param: str, kind: str) -> Iterator[ShardSpec]:
        """Yields the shards of the rank's equal share of the interleaved QKV rows.

        With more ranks than key heads, a share can begin or end inside a query group.
        """
        dim, groups = head_dim(config), config.num_key_value_heads
        per_group = config.num_attention_heads // groups
        tail = (config.hidden_size,) if kind == "weight" else ()
        segments = (("q_proj", per_group * dim), ("k_proj", dim), ("v_proj", dim))
        share = groups * (per_group + 2) * dim // self.size
        begin, end = self.rank * share, (self.rank + 1) * share
        for name, size in segments:
            offset = sum(s for n, s in segments[: [n for n, _ in segments].index(name)])
            for group in range(groups):
                low = group * (per_group + 2) * dim + offset  # first interleaved row of the segment
                a, b = max(low, begin), min(low + size, end)
                if a < b:
                    shape = (groups * size, *tail)
                    first = group * size + a - low
                    yield self.rows(f"{prefix}.{name}.{kind}", f"{param}.{kind}", shape, first, b - a, at=a - begin)


def _dense_specs(config: PretrainedConfig, parallel: ParallelConfig, pp: int, tp: int) -> list[ShardSpec]:
    """Lists the shards of tensor-parallel rank `tp` of pipeline rank `pp`, without experts."""
    hidden = config.hidden_size
    result: list[ShardSpec] = []
    stages = parallel.stage_layers(config.num_hidden_layers)[pp]
    for number, layers in enumerate(stages):
        stage = _Stage(number, tp, parallel.tp_size)
        embeds = pp == 0 and number == 0
        if embeds:
            result += stage.vocabulary(config, "model.embed_tokens.weight", "embedding.word_embeddings.weight")
        for local, layer in enumerate(layers):
            result += _layer_specs(config, stage, layer, f"decoder.layers.{local}")
        if pp == parallel.pp_size - 1 and number == len(stages) - 1:
            result.append(stage.replicated("model.norm.weight", "decoder.final_layernorm.weight", hidden))
            if is_scalar(config):
                result.append(stage.replicated(SCORE, "output_layer.weight", 1, hidden))
            elif not config.tie_word_embeddings:
                result += stage.vocabulary(config, "lm_head.weight", "output_layer.weight")
            elif not embeds:  # the last stage holds a copy of the tied embedding
                result += stage.vocabulary(config, "model.embed_tokens.weight", "output_layer.weight")
    return result


def _layer_specs(config: PretrainedConfig, stage: _Stage, layer: int, native: str) -> Iterator[ShardSpec]:
    """Yields the shards of one layer, without experts. `native` is the prefix of the layer's parameters."""
    family, hidden, dim = FAMILIES[config.model_type], config.hidden_size, head_dim(config)
    prefix, attention = f"model.layers.{layer}", f"{native}.self_attention"
    yield stage.replicated(f"{prefix}.input_layernorm.weight", f"{native}.input_layernorm.weight", hidden)
    yield from stage.qkv(config, f"{prefix}.self_attn", f"{attention}.linear_qkv", "weight")
    qkv_bias, out_bias = attention_biases(config)
    if qkv_bias:
        yield from stage.qkv(config, f"{prefix}.self_attn", f"{attention}.linear_qkv", "bias")
    if family.qk_norm:
        for which in "qk":
            name = f"{prefix}.self_attn.{which}_norm.weight"
            yield stage.replicated(name, f"{attention}.{which}_layernorm.weight", dim)
    width = config.num_attention_heads * dim
    yield stage.columns(f"{prefix}.self_attn.o_proj.weight", f"{attention}.linear_proj.weight", hidden, width)
    if out_bias:
        yield stage.replicated(f"{prefix}.self_attn.o_proj.bias", f"{attention}.linear_proj.bias", hidden)
    yield stage.replicated(f"{prefix}.post_attention_layernorm.weight", f"{native}.pre_mlp_layernorm.weight", hidden)
    if family.experts is not None and (moe := moe_shape(config)) is not None and moe.layers[layer]:
        router = f"{prefix}.{family.experts.block}.gate.weight"
        yield stage.replicated(router, f"{native}.mlp.router.weight", moe.experts, hidden)
        return
    height = config.intermediate_size
    names = (f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight")
    yield from stage.gated(names, f"{native}.mlp.linear_fc1.weight", height, hidden)
    yield stage.columns(f"{prefix}.mlp.down_proj.weight", f"{native}.mlp.linear_fc2.weight", hidden, height)


def _expert_specs(config: PretrainedConfig, parallel: ParallelConfig, pp: int, ep: int, etp: int) -> list[ShardSpec]:
    """Lists the expert shards of expert-parallel rank `ep` and expert tensor-parallel rank `etp`."""
    names, moe = FAMILIES[config.model_type].experts, moe_shape(config)
    if names is None or moe is None:
        return []
    result: list[ShardSpec] = []
    count = moe.experts // parallel.ep_size
    for number, layers in enumerate(parallel.stage_layers(config.num_hidden_layers)[pp]):
        stage = _Stage(number, etp, parallel.expert_tp_size)
        for local, layer in enumerate(layers):
            if not moe.layers[layer]:
                continue
            for expert in range(count):
                hf = f"model.layers.{layer}.{names.block}.experts.{ep * count + expert}"
                native = f"decoder.layers.{local}.mlp.experts.local_experts.{expert}"
                gate_up = (f"{hf}.{names.gate}.weight", f"{hf}.{names.up}.weight")
                result += stage.gated(gate_up, f"{native}.linear_fc1.weight", moe.width, config.hidden_size)
                result.append(
                    stage.columns(
                        f"{hf}.{names.down}.weight", f"{native}.linear_fc2.weight", config.hidden_size, moe.width
                    )
                )
    return result
