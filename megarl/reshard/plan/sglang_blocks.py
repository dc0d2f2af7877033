"""SGLang's layout of a layer's blocks: which boxes of the checkpoint a rank holds, and where.

A block stands here twice: as in the checkpoint, and `padded` as SGLang shards it on CPU. Elsewhere both are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.families.blocks import Attention, Experts, LatentAttention, Mlp
from megarl.knobs import UserError
from megarl.reshard.plan.holdings import Box


@dataclass(frozen=True)
class Span:
    """A rank's shard along one dimension: `size` entries from `start` on.

    Entries from `total` on are padding and belong to no entry of the checkpoint.
    """

    start: int
    size: int
    total: int

    @property
    def stop(self) -> int:
        return min(self.start + self.size, self.total)


@dataclass(frozen=True)
class ParameterPart:
    """A box of the checkpoint and the place `at`, in the parameter's dimensions, where it begins in a parameter."""

    at: tuple[int, ...]
    box: Box
    step: int = 1  # between the box's rows in the parameter


@dataclass(frozen=True)
class ServerParameter:
    """One parameter of a server rank by the rules: its name in SGLang, its shape and the boxes in it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[ParameterPart, ...]


@dataclass(frozen=True)
class TpRank:
    """Tensor-parallel rank `tp_rank` of `tp_size` of a server; groups of `tp_size / ep_size` share experts."""

    tp_rank: int
    tp_size: int
    ep_size: int = 1

    def check_divides(self, what: str, size: int, ranks: int) -> None:
        """Refuses a size that the ranks do not divide.

        Raises:
            UserError: naming both.
        """
        if size % ranks:
            raise UserError(
                f"SGLang cannot share {size} {what} out to {ranks} ranks at tp_size={self.tp_size}; change it"
            )

    def span(self, size: int, padded: int) -> Span:
        """This rank's equal share of `padded` entries, of which `size` are in the checkpoint."""
        share = padded // self.tp_size
        return Span(self.tp_rank * share, share, size)


def attention_parameters(block: Attention, padded: Attention, hidden: int, rank: TpRank) -> Iterator[ServerParameter]:
    """Yields the parameters of grouped-query attention, named within the layer.

    Raises:
        UserError: the ranks do not divide the heads.
    """
    tp = rank.tp_size
    if padded.kv_heads % tp and tp % padded.kv_heads:
        raise UserError(f"SGLang at tp_size={tp} cannot share out {padded.kv_heads} KV heads; change tp_size")
    rank.check_divides("attention heads", padded.heads, tp)
    dim, full = block.head_dim, full_span(hidden)
    q_span = rank.span(block.q_size, padded.heads * dim)
    queries = rank.span(2 * block.q_size, 2 * padded.heads * dim) if block.output_gate else q_span
    replicas = max(1, tp // padded.kv_heads)  # where tp exceeds the KV heads, neighbours hold the same one
    size = max(1, padded.kv_heads // tp) * dim
    kv_span = Span(rank.tp_rank // replicas * size, size, block.kv_size)
    qkv = [("q_proj", queries), ("k_proj", kv_span), ("v_proj", kv_span)]
    module = "" if block.output_gate else "self_attn."  # SGLang's classes with a gate are layer and attention in one
    yield stacked(f"{module}qkv_proj.weight", [(f"self_attn.{n}.weight", s) for n, s in qkv], full)
    if block.qkv_bias:
        yield stacked(f"{module}qkv_proj.bias", [(f"self_attn.{n}.bias", s) for n, s in qkv])
    if block.output_bias:
        yield stacked(f"{module}o_proj.bias", [("self_attn.o_proj.bias", full)])
    yield stacked(f"{module}o_proj.weight", [("self_attn.o_proj.weight", full)], q_span)
    if block.sinks:
        yield stacked("self_attn.sinks", [("self_attn.sinks", rank.span(block.heads, padded.heads))])
    if block.qk_norm:
        for norm in ("q_norm.weight", "k_norm.weight"):
            yield stacked(f"{module}{norm}", [(f"self_attn.{norm}", full_span(dim))])


def latent_parameters(block: LatentAttention, hidden: int, rank: TpRank) -> Iterator[ServerParameter]:
    """Yields the parameters of latent attention, named within the layer. SGLang pads none of them on CPU.

    Raises:
        UserError: the ranks do not divide the heads.
    """
    rank.check_divides("attention heads", block.heads, rank.tp_size)
    full, kv = full_span(hidden), ("self_attn.kv_a_proj_with_mqa.weight", full_span(block.kv_rank + block.rotary_dim))
    q_rank, kv_rank = full_span(block.query_rank), full_span(block.kv_rank)
    q_span = rank.span(block.q_size, block.q_size)
    if block.query_rank:
        rows = [("self_attn.q_a_proj.weight", q_rank), kv]
        yield stacked("self_attn.fused_qkv_a_proj_with_mqa.weight", rows, full)
        yield stacked("self_attn.q_a_layernorm.weight", [("self_attn.q_a_layernorm.weight", q_rank)])
        yield stacked("self_attn.q_b_proj.weight", [("self_attn.q_b_proj.weight", q_span)], q_rank)
    else:
        yield stacked("self_attn.q_proj.weight", [("self_attn.q_proj.weight", q_span)], full)
        yield stacked("self_attn.kv_a_proj_with_mqa.weight", [kv], full)
    yield stacked("self_attn.kv_a_layernorm.weight", [("self_attn.kv_a_layernorm.weight", kv_rank)])
    up = rank.span(block.kv_rows, block.kv_rows)
    yield stacked("self_attn.kv_b_proj.weight", [("self_attn.kv_b_proj.weight", up)], kv_rank)
    width = block.heads * block.value_dim
    yield stacked("self_attn.o_proj.weight", [("self_attn.o_proj.weight", full)], rank.span(width, width))


def mlp_parameters(
    block: Mlp, padded: Mlp, hidden: int, rank: TpRank, module: str = "mlp"
) -> Iterator[ServerParameter]:
    """Yields the parameters of a gated MLP, named within the layer.

    Raises:
        UserError: the ranks do not divide its neurons.
    """
    rank.check_divides("MLP neurons", padded.width, rank.tp_size)
    span, full = rank.span(block.width, padded.width), full_span(hidden)
    gate_up = [(f"{module}.{n}.weight", span) for n in ("gate_proj", "up_proj")]
    yield stacked(f"{module}.gate_up_proj.weight", gate_up, full)
    yield stacked(f"{module}.down_proj.weight", [(f"{module}.down_proj.weight", full)], span)


def expert_parameters(block: Experts, padded: Experts, hidden: int, rank: TpRank) -> Iterator[ServerParameter]:
    """Yields the parameters of a mixture of experts, named within the layer.

    Raises:
        UserError: the ranks do not divide the experts or their neurons.
    """
    ranks = rank.tp_size // rank.ep_size  # that share each expert
    rank.check_divides("experts", block.count, rank.ep_size)
    rank.check_divides("neurons of an expert", padded.width, ranks)
    names, full = block.names, full_span(hidden)
    router = f"{names.block}.{names.router}"
    yield stacked(f"{router}.weight", [(f"{router}.weight", full_span(block.count))], full)
    if names.interleaved:
        yield stacked(f"{router}.bias", [(f"{router}.bias", full_span(block.count))])
        yield from _interleaved_experts(block, padded, hidden, rank)
        return
    if block.selection_bias:
        bias = f"{router}.e_score_correction_bias"
        yield stacked(bias, [(bias, full_span(block.count))])
    if block.shared_width:
        yield from _shared_expert(block, padded, hidden, rank)
    local = block.count // rank.ep_size
    first = rank.tp_rank // ranks * local
    share = padded.width // ranks
    span = Span(rank.tp_rank % ranks * share, share, block.width)
    w13: list[ParameterPart] = []
    w2: list[ParameterPart] = []
    for slot in range(local):
        expert = f"{names.block}.experts.{first + slot}"
        gate_up = [(f"{expert}.{n}.weight", span) for n in (names.gate, names.up)]
        w13 += [ParameterPart((slot, *p.at), p.box) for p in stacked("", gate_up, full).parts]
        down = stacked("", [(f"{expert}.{names.down}.weight", full)], span)
        w2 += [ParameterPart((slot, *p.at), p.box) for p in down.parts]
    experts = f"{names.block}.experts"
    yield ServerParameter(f"{experts}.w13_weight", (local, 2 * share, hidden), tuple(w13))
    yield ServerParameter(f"{experts}.w2_weight", (local, hidden, share), tuple(w2))


def _shared_expert(block: Experts, padded: Experts, hidden: int, rank: TpRank) -> Iterator[ServerParameter]:
    """Yields the parameters of the expert that every token takes, which all tensor-parallel ranks share."""
    module = f"{block.names.block}.{block.names.shared}"
    yield from mlp_parameters(Mlp(block.shared_width), Mlp(padded.shared_width), hidden, rank, module)
    if block.shared_gate:
        gate = f"{module}_gate.weight"
        yield stacked(gate, [(gate, full_span(1))], full_span(hidden))


def _interleaved_experts(block: Experts, padded: Experts, hidden: int, rank: TpRank) -> Iterator[ServerParameter]:
    """Yields gpt-oss's experts: gate and up rows in turn, and biases. Only the first rank has the output's.

    Raises:
        UserError: SGLang's loader of these tensors (`weight_loader_fused`) gives every rank all experts.
    """
    if rank.ep_size > 1:
        raise UserError(f"SGLang loads gpt-oss's experts in 16 bits at ep_size=1 only, not {rank.ep_size}; set it to 1")
    names, full = block.names, full_span(hidden)
    span, experts = rank.span(block.width, padded.width), f"{block.names.block}.experts"
    shapes = {"w13_weight": (2 * span.size, hidden), "w13_weight_bias": (2 * span.size,)}
    shapes |= {"w2_weight": (hidden, span.size), "w2_weight_bias": (hidden,)}
    parts: dict[str, list[ParameterPart]] = {name: [] for name in shapes}
    for slot in range(block.count):
        prefix = f"{experts}.{slot}"
        for turn, part in enumerate((names.gate, names.up)):
            for kind, rest, holder in (("weight", (full,), "w13_weight"), ("bias", (), "w13_weight_bias")):
                for p in stacked("", [(f"{prefix}.{part}.{kind}", span)], *rest).parts:
                    parts[holder].append(ParameterPart((slot, turn, *p.at[1:]), p.box, step=2))
        down = stacked("", [(f"{prefix}.{names.down}.weight", full)], span).parts
        bias = stacked("", [(f"{prefix}.{names.down}.bias", full)]).parts if rank.tp_rank == 0 else ()
        parts["w2_weight"] += [ParameterPart((slot, *p.at), p.box) for p in down]
        parts["w2_weight_bias"] += [ParameterPart((slot, *p.at), p.box) for p in bias]
    for name, shape in shapes.items():
        yield ServerParameter(f"{experts}.{name}", (block.count, *shape), tuple(parts[name]))


def full_span(size: int) -> Span:
    return Span(0, size, size)


def round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def stacked(name: str, tensors: list[tuple[str, Span]], *rest: Span) -> ServerParameter:
    """A parameter that stacks shards of checkpoint tensors along its rows; `rest` spans the other dimensions."""
    parts, row = [], 0
    for tensor, span in tensors:
        spans = (span, *rest)
        if all(s.start < s.stop for s in spans):  # else all of it is padding
            box = Box(tensor, tuple(s.start for s in spans), tuple(s.stop for s in spans))
            parts.append(ParameterPart((row, *(0 for _ in rest)), box))
        row += span.size
    return ServerParameter(name, (row, *(s.size for s in rest)), tuple(parts))
