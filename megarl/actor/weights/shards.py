"""Which box of which HF tensor lies where in which native parameter, for any rank of any layout.

The one table behind loading, exporting, checkpoints and resharding. It is worked out from the HF config and the layout
alone, without Megatron and without a model, so that it serves worlds of any size; `hf.shards` binds it to live
parameters.

    pieces(config, parallel, place)   what one rank holds, as a list
    world_table(config, parallel)     what all ranks hold, as arrays, replicas once

A piece is a box of a HF tensor and, of the same extent, a box of a native parameter. Megatron lays out

    linear_qkv   for each query group its query heads, its key head, its value head; cut evenly over tp
    linear_fc1   gate rows of this rank, then up rows of this rank
    embeddings   an equal number of rows on every tp rank, the last ones padding, which is in no piece
    experts      num_experts / ep of them on each ep rank, each cut over etp
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
    """The box `[start, stop)` of HF tensor `name` (of full `shape`) lies in a native parameter from `at` on.

    All are in elements and have as many entries as the tensor has dimensions. `param` is the parameter's name in the
    module of virtual stage `stage`, as Megatron's local layer spec has it.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    stage: int
    param: str
    at: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the piece lies in its native parameter."""
        return tuple(slice(p, p + b - a) for p, a, b in zip(self.at, self.start, self.stop, strict=True))


def shard_specs(config: PretrainedConfig, parallel: ParallelConfig, place: Place) -> list[ShardSpec]:
    """Everything that the rank at `place` holds: first what `tp` cuts, then its experts, each in layer order."""
    dense = _dense_pieces(config, parallel, place.pp, place.tp)
    return [*dense, *_expert_pieces(config, parallel, place.pp, place.ep, place.etp)]


@dataclass(frozen=True, eq=False)
class WorldTable:
    """What all ranks of a layout hold. Row `i` is one piece, held by every rank of a set: replicas are listed once.

    `tensor [n]` indexes `names` and `shape [names, 2]`; `start`, `stop [n, 2]` are in elements, and a dimension that a
    tensor lacks is `[0, 1)`. `holder [n]` indexes `holders`, sets of world ranks that hold all rows of the set. A rank
    is in at most two sets, that of its dense weights before that of its experts: its rows, in the order of the table,
    are its `shard_specs` in their order.
    """

    names: tuple[str, ...]
    shape: Ints
    tensor: Ints
    start: Ints
    stop: Ints
    holder: Ints
    holders: tuple[tuple[int, ...], ...]


def world_table(config: PretrainedConfig, parallel: ParallelConfig) -> WorldTable:
    """The table of the whole world of `parallel`; 1,024 ranks of a 235B MoE take less than a second."""
    dense: dict[tuple[int, ...], list[int]] = {}
    experts: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places(parallel)):
        dense.setdefault((place.pp, place.tp), []).append(rank)
        if moe_shape(config) is not None:
            experts.setdefault((place.pp, place.ep, place.etp), []).append(rank)
    sets = [
        *((_dense_pieces(config, parallel, *key), ranks) for key, ranks in dense.items()),
        *((_expert_pieces(config, parallel, *key), ranks) for key, ranks in experts.items()),
    ]
    names: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    rows: list[tuple[int, ...]] = []
    counts = []
    for found, _ in sets:
        counts.append(len(found))
        for piece in found:
            tensor = names.setdefault(piece.name, len(names))
            if tensor == len(shapes):
                shapes.append((*piece.shape, 1)[:2])
            rows.append((tensor, *(*piece.start, 0)[:2], *(*piece.stop, 1)[:2]))
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
    """Every HF tensor of the model and its shape, whatever the layout, in the order of an export."""
    return {piece.name: piece.shape for piece in shard_specs(config, ParallelConfig(), Place(0, 0, 0, 0, 0, 0, 0))}


class _Stage:
    """Makes the pieces of one virtual stage of one rank, which is number `rank` of the `size` that cut its matrices."""

    def __init__(self, stage: int, rank: int, size: int) -> None:
        self.stage, self.rank, self.size = stage, rank, size

    def rows(self, name: str, param: str, shape: tuple[int, ...], first: int, count: int, at: int = 0) -> ShardSpec:
        """Rows `[first, first + count)` of the HF tensor, from row `at` of the parameter on."""
        zeros = (0,) * (len(shape) - 1)
        return ShardSpec(name, shape, (first, *zeros), (first + count, *shape[1:]), self.stage, param, (at, *zeros))

    def whole(self, name: str, param: str, *shape: int) -> ShardSpec:
        """The same on every rank."""
        return self.rows(name, param, shape, 0, shape[0])

    def columns(self, name: str, param: str, height: int, width: int) -> ShardSpec:
        """The rank's equal share of the columns."""
        share = width // self.size
        first = self.rank * share
        return ShardSpec(name, (height, width), (0, first), (height, first + share), self.stage, param, (0, 0))

    def gated(self, names: tuple[str, str], param: str, height: int, width: int) -> Iterator[ShardSpec]:
        """The rank's share of the gate rows, then of the up rows."""
        share = height // self.size
        for i, name in enumerate(names):
            yield self.rows(name, param, (height, width), self.rank * share, share, at=i * share)

    def vocabulary(self, config: PretrainedConfig, name: str, param: str) -> Iterator[ShardSpec]:
        share = padded_vocab_size(config, self.size) // self.size
        first = self.rank * share
        if first < config.vocab_size:
            count = min(share, config.vocab_size - first)
            yield self.rows(name, param, (config.vocab_size, config.hidden_size), first, count)

    def qkv(self, config: PretrainedConfig, prefix: str, param: str, kind: str) -> Iterator[ShardSpec]:
        """The rank's even share of the interleaved rows; with more ranks than key heads it may cut a group."""
        dim, groups = head_dim(config), config.num_key_value_heads
        per_group = config.num_attention_heads // groups
        tail = (config.hidden_size,) if kind == "weight" else ()
        segments = (("q_proj", per_group * dim), ("k_proj", dim), ("v_proj", dim))
        share = groups * (per_group + 2) * dim // self.size
        begin, end = self.rank * share, (self.rank + 1) * share
        for name, size in segments:
            offset = sum(s for n, s in segments[: [n for n, _ in segments].index(name)])
            for group in range(groups):
                low = group * (per_group + 2) * dim + offset  # where the segment begins in the interleaved rows
                a, b = max(low, begin), min(low + size, end)
                if a < b:
                    shape = (groups * size, *tail)
                    first = group * size + a - low
                    yield self.rows(f"{prefix}.{name}.{kind}", f"{param}.{kind}", shape, first, b - a, at=a - begin)


def _dense_pieces(config: PretrainedConfig, parallel: ParallelConfig, pp: int, tp: int) -> list[ShardSpec]:
    """What tensor parallel rank `tp` of pipeline rank `pp` holds, experts aside."""
    hidden = config.hidden_size
    result: list[ShardSpec] = []
    stages = parallel.stage_layers(config.num_hidden_layers)[pp]
    for number, layers in enumerate(stages):
        stage = _Stage(number, tp, parallel.tp_size)
        embeds = pp == 0 and number == 0
        if embeds:
            result += stage.vocabulary(config, "model.embed_tokens.weight", "embedding.word_embeddings.weight")
        for local, layer in enumerate(layers):
            result += _layer_pieces(config, stage, layer, f"decoder.layers.{local}")
        if pp == parallel.pp_size - 1 and number == len(stages) - 1:
            result.append(stage.whole("model.norm.weight", "decoder.final_layernorm.weight", hidden))
            if is_scalar(config):
                result.append(stage.whole(SCORE, "output_layer.weight", 1, hidden))
            elif not config.tie_word_embeddings:
                result += stage.vocabulary(config, "lm_head.weight", "output_layer.weight")
            elif not embeds:  # the last stage holds a copy of the tied embedding
                result += stage.vocabulary(config, "model.embed_tokens.weight", "output_layer.weight")
    return result


def _layer_pieces(config: PretrainedConfig, stage: _Stage, layer: int, native: str) -> Iterator[ShardSpec]:
    family, hidden, dim = FAMILIES[config.model_type], config.hidden_size, head_dim(config)
    prefix, attention = f"model.layers.{layer}", f"{native}.self_attention"
    yield stage.whole(f"{prefix}.input_layernorm.weight", f"{native}.input_layernorm.weight", hidden)
    yield from stage.qkv(config, f"{prefix}.self_attn", f"{attention}.linear_qkv", "weight")
    qkv_bias, out_bias = attention_biases(config)
    if qkv_bias:
        yield from stage.qkv(config, f"{prefix}.self_attn", f"{attention}.linear_qkv", "bias")
    if family.qk_norm:
        for which in "qk":
            name = f"{prefix}.self_attn.{which}_norm.weight"
            yield stage.whole(name, f"{attention}.{which}_layernorm.weight", dim)
    width = config.num_attention_heads * dim
    yield stage.columns(f"{prefix}.self_attn.o_proj.weight", f"{attention}.linear_proj.weight", hidden, width)
    if out_bias:
        yield stage.whole(f"{prefix}.self_attn.o_proj.bias", f"{attention}.linear_proj.bias", hidden)
    yield stage.whole(f"{prefix}.post_attention_layernorm.weight", f"{native}.pre_mlp_layernorm.weight", hidden)
    if family.experts is not None and (moe := moe_shape(config)) is not None and moe.layers[layer]:
        router = f"{prefix}.{family.experts.block}.gate.weight"
        yield stage.whole(router, f"{native}.mlp.router.weight", moe.experts, hidden)
        return
    height = config.intermediate_size
    names = (f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight")
    yield from stage.gated(names, f"{native}.mlp.linear_fc1.weight", height, hidden)
    yield stage.columns(f"{prefix}.mlp.down_proj.weight", f"{native}.mlp.linear_fc2.weight", hidden, height)


def _expert_pieces(config: PretrainedConfig, parallel: ParallelConfig, pp: int, ep: int, etp: int) -> list[ShardSpec]:
    """The experts of expert parallel rank `ep`, and of them what rank `etp` of the expert's own tensor parallel has."""
    called, moe = FAMILIES[config.model_type].experts, moe_shape(config)
    if called is None or moe is None:
        return []
    result: list[ShardSpec] = []
    count = moe.experts // parallel.ep_size
    for number, layers in enumerate(parallel.stage_layers(config.num_hidden_layers)[pp]):
        stage = _Stage(number, etp, parallel.expert_tp_size)
        for local, layer in enumerate(layers):
            if not moe.layers[layer]:
                continue
            for expert in range(count):
                hf = f"model.layers.{layer}.{called.block}.experts.{ep * count + expert}"
                native = f"decoder.layers.{local}.mlp.experts.local_experts.{expert}"
                names = (f"{hf}.{called.gate}.weight", f"{hf}.{called.up}.weight")
                result += stage.gated(names, f"{native}.linear_fc1.weight", moe.width, config.hidden_size)
                result.append(
                    stage.columns(
                        f"{hf}.{called.down}.weight", f"{native}.linear_fc2.weight", config.hidden_size, moe.width
                    )
                )
    return result
