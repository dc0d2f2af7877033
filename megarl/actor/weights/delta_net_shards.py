"""Shards of gated delta nets: HF tensors in the parameters of `actor/model/attention/delta_net.py`.

Each rank's rows of `in_proj` are query, key, value, z, beta and alpha of its heads. Checkpoints of Qwen3.5 have them in
`in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, and Qwen3-Next by key head in `in_proj_qkvz`, `in_proj_ba`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from megarl.actor.weights.shard_spec import ShardSpec, Stage
from megarl.families.blocks import DeltaNet


def delta_net_shards(stage: Stage, block: DeltaNet, hidden: int, prefix: str, native: str) -> Iterator[ShardSpec]:
    """Yields the shards of a gated delta net."""
    yield from (_grouped if block.grouped else _ungrouped)(stage, block, hidden, prefix, f"{native}.in_proj.weight")
    sections = block.sections(1)[:3]
    conv = f"{prefix}.conv1d.weight", f"{native}.conv1d.weight", (sum(sections), 1, block.conv_width)
    yield from _cut(stage, conv, sections)
    share = block.value_heads // stage.size
    heads = (block.value_heads,), stage.rank * share, share
    yield stage.rows(f"{prefix}.dt_bias", f"{native}.dt_bias", *heads)
    yield replace(stage.rows(f"{prefix}.A_log", f"{native}.A_log", *heads), float32=True)
    norm = stage.replicated(f"{prefix}.norm.weight", f"{native}.out_norm.weight", block.value_dim)
    yield replace(norm, float32=True)
    yield stage.columns(f"{prefix}.out_proj.weight", f"{native}.out_proj.weight", hidden, block.value_size)


def _cut(
    stage: Stage, tensor: tuple[str, str, tuple[int, ...]], sections: tuple[int, ...], at: int = 0
) -> Iterator[ShardSpec]:
    """Yields the rank's share of each section of a tensor's rows, in the parameter from row `at` on."""
    name, param, shape = tensor
    first = 0
    for size in sections:
        share = size // stage.size
        yield stage.rows(name, param, shape, first + stage.rank * share, share, at=at)
        first, at = first + size, at + share


def _ungrouped(stage: Stage, block: DeltaNet, hidden: int, prefix: str, param: str) -> Iterator[ShardSpec]:
    sections = block.sections(1)
    starts = [0, *accumulate(block.sections(stage.size))]
    parts = (("qkv", sections[:3], 0), ("z", sections[3:4], 3), ("b", sections[4:5], 4), ("a", sections[5:], 5))
    for name, rows, place in parts:
        tensor = f"{prefix}.in_proj_{name}.weight", param, (sum(rows), hidden)
        yield from _cut(stage, tensor, rows, at=starts[place])


def _grouped(stage: Stage, block: DeltaNet, hidden: int, prefix: str, param: str) -> Iterator[ShardSpec]:
    local = block.key_heads // stage.size
    starts = [0, *accumulate(block.sections(stage.size))]
    for name, places in (("qkvz", range(4)), ("ba", range(4, 6))):
        per_head = [block.sections(block.key_heads)[place] for place in places]
        shape, group = (sum(per_head) * block.key_heads, hidden), sum(per_head)
        for offset, size, place in zip([0, *accumulate(per_head)], per_head, places, strict=False):
            for head in range(local):
                first = (stage.rank * local + head) * group + offset
                at = starts[place] + head * size
                yield stage.rows(f"{prefix}.in_proj_{name}.weight", param, shape, first, size, at=at)
