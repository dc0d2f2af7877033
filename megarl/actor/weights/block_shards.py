"""Shards of a layer's blocks: HF tensors of attention, MLPs and experts in Megatron's parameters.

`prefix` is the module's name in the checkpoint, `native` its name in Megatron's local layer spec.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.actor.weights.shard_spec import ShardSpec, Stage
from megarl.families.blocks import Attention, Experts, LatentAttention, Mlp

SELECTION_BIAS = ".e_score_correction_bias"  # end of the HF name; a float32 buffer of Megatron, not trained


def is_buffer(name: str) -> bool:
    """True if a HF tensor is a float32 buffer of Megatron in models of any dtype, and not trained."""
    return name.endswith(SELECTION_BIAS)


def attention_shards(
    stage: Stage, block: Attention | LatentAttention, hidden: int, prefix: str, native: str
) -> Iterator[ShardSpec]:
    """Yields the shards of attention."""
    if isinstance(block, LatentAttention):
        yield from latent_attention_shards(stage, block, hidden, prefix, native)
        return
    yield from _qkv(stage, block, hidden, prefix, native, "weight")
    if block.qkv_bias:
        yield from _qkv(stage, block, hidden, prefix, native, "bias")
    if block.qk_norm:
        for which in "qk":
            name = f"{prefix}.{which}_norm.weight"
            yield stage.replicated(name, f"{native}.{which}_layernorm.weight", block.head_dim)
    yield stage.columns(f"{prefix}.o_proj.weight", f"{native}.linear_proj.weight", hidden, block.q_size)
    if block.output_bias:
        yield stage.replicated(f"{prefix}.o_proj.bias", f"{native}.linear_proj.bias", hidden)
    if block.sinks:
        share = block.heads // stage.size
        param = f"{native}.core_attention.softmax_offset"
        yield stage.rows(f"{prefix}.sinks", param, (block.heads,), stage.rank * share, share)


def latent_attention_shards(
    stage: Stage, block: LatentAttention, hidden: int, prefix: str, native: str
) -> Iterator[ShardSpec]:
    """Yields the shards of latent attention. Projections to latent vectors are complete on every tp rank."""
    if block.query_rank:
        query = f"{native}.linear_q_down_proj.weight"
        yield stage.replicated(f"{prefix}.q_a_proj.weight", query, block.query_rank, hidden)
        yield stage.replicated(f"{prefix}.q_a_layernorm.weight", f"{native}.q_layernorm.weight", block.query_rank)
        up, shape = f"{native}.linear_q_up_proj.weight", (block.q_size, block.query_rank)
        yield stage.share_of_rows(f"{prefix}.q_b_proj.weight", up, *shape)
    else:
        yield stage.share_of_rows(f"{prefix}.q_proj.weight", f"{native}.linear_q_proj.weight", block.q_size, hidden)
    down, rows = f"{native}.linear_kv_down_proj.weight", block.kv_rank + block.rotary_dim
    yield stage.replicated(f"{prefix}.kv_a_proj_with_mqa.weight", down, rows, hidden)
    yield stage.replicated(f"{prefix}.kv_a_layernorm.weight", f"{native}.kv_layernorm.weight", block.kv_rank)
    up = f"{native}.linear_kv_up_proj.weight"
    yield stage.share_of_rows(f"{prefix}.kv_b_proj.weight", up, block.kv_rows, block.kv_rank)
    width = block.heads * block.value_dim
    yield stage.columns(f"{prefix}.o_proj.weight", f"{native}.linear_proj.weight", hidden, width)


def _qkv(stage: Stage, block: Attention, hidden: int, prefix: str, native: str, kind: str) -> Iterator[ShardSpec]:
    """Yields the shards of the rank's equal share of the interleaved QKV rows.

    With more ranks than key heads, a share can begin or end inside a query group.
    """
    groups = block.kv_heads
    tail = (hidden,) if kind == "weight" else ()
    segments = _qkv_segments(block)
    total = sum(size for _, _, _, size in segments)
    share = groups * total // stage.size
    begin, end = stage.rank * share, (stage.rank + 1) * share
    offset = 0
    for name, rows, start, size in segments:
        for group in range(groups):
            low = group * total + offset  # first interleaved row of the segment
            a, b = max(low, begin), min(low + size, end)
            if a < b:
                shape, first = (groups * rows, *tail), group * rows + start + a - low
                param = f"{native}.linear_qkv.{kind}"
                yield stage.rows(f"{prefix}.{name}.{kind}", param, shape, first, b - a, at=a - begin)
        offset += size


def _qkv_segments(block: Attention) -> list[tuple[str, int, int, int]]:
    """Lists a query group's rows in Megatron's order: the HF tensor, its rows by group, first row there, and number.

    Megatron has all queries of a group, then all gates. HF's q_proj has each head's query, then its gate.
    """
    dim, per_group = block.head_dim, block.heads // block.kv_heads
    keys_values = [("k_proj", dim, 0, dim), ("v_proj", dim, 0, dim)]
    if not block.output_gate:
        return [("q_proj", per_group * dim, 0, per_group * dim), *keys_values]
    starts = [*range(0, 2 * per_group, 2), *range(1, 2 * per_group, 2)]
    return [*(("q_proj", 2 * per_group * dim, start * dim, dim) for start in starts), *keys_values]


def mlp_shards(stage: Stage, block: Mlp, hidden: int, prefix: str, native: str) -> Iterator[ShardSpec]:
    """Yields the shards of a gated MLP."""
    names = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
    yield from stage.gated(names, f"{native}.linear_fc1.weight", block.width, hidden)
    yield stage.columns(f"{prefix}.down_proj.weight", f"{native}.linear_fc2.weight", hidden, block.width)


def router_shards(stage: Stage, block: Experts, hidden: int, prefix: str, native: str) -> Iterator[ShardSpec]:
    """Yields the shards of the router and of the shared expert, which every rank of a mixture of experts holds."""
    gate = f"{prefix}.{block.names.block}.{block.names.router}"
    yield stage.replicated(f"{gate}.weight", f"{native}.router.weight", block.count, hidden)
    if block.biased:
        yield stage.replicated(f"{gate}.bias", f"{native}.router.bias", block.count)
    if block.selection_bias:
        yield stage.replicated(f"{gate}{SELECTION_BIAS}", f"{native}.router.expert_bias", block.count)
    if block.shared_width:
        shared, param = f"{prefix}.{block.names.block}.{block.names.shared}", f"{native}.shared_experts"
        yield from mlp_shards(stage, Mlp(block.shared_width), hidden, shared, param)
        if block.shared_gate:
            yield stage.replicated(f"{shared}_gate.weight", f"{param}.gate_weight", 1, hidden)


def expert_shards(
    stage: Stage, block: Experts, hidden: int, prefix: str, native: str, owned: range
) -> Iterator[ShardSpec]:
    """Yields the shards of the experts `owned` by an expert-parallel rank."""
    names = block.names
    for local, expert in enumerate(owned):
        hf, param = f"{prefix}.{names.block}.experts.{expert}", f"{native}.experts.local_experts.{local}"
        gate_up = (f"{hf}.{names.gate}.weight", f"{hf}.{names.up}.weight")
        yield from stage.gated(gate_up, f"{param}.linear_fc1.weight", block.width, hidden)
        yield stage.columns(f"{hf}.{names.down}.weight", f"{param}.linear_fc2.weight", hidden, block.width)
        if block.biased:
            share = block.width // stage.size
            for turn, part in enumerate((names.gate, names.up)):
                bias, first = f"{param}.linear_fc1.bias", stage.rank * share
                yield stage.rows(f"{hf}.{part}.bias", bias, (block.width,), first, share, at=turn * share)
            yield stage.replicated(f"{hf}.{names.down}.bias", f"{param}.linear_fc2.bias", hidden)
