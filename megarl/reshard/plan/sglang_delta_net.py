"""SGLang's layout of gated delta nets: which boxes of the checkpoint a rank holds, and where.

The rules follow `models/qwen3_next.py` and `models/qwen3_5.py` of SGLang 0.5.23:

    in_proj_qkvz  Qwen3.5: query, key, value, z rows of this rank's heads; Qwen3-Next: equal share of its rows
    in_proj_ba    beta and alpha, alike
    conv1d        query, key and value channels of this rank's heads
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.families.blocks import DeltaNet
from megarl.reshard.plan.sglang_blocks import ServerParameter, Span, TpRank, full_span, stacked

PREFIX = "linear_attn"


def delta_net_parameters(block: DeltaNet, hidden: int, rank: TpRank) -> Iterator[ServerParameter]:
    """Yields the parameters of a gated delta net, named within the layer.

    Raises:
        UserError: the ranks do not divide its heads.
    """
    rank.check_divides("key heads of gated delta nets", block.key_heads, rank.tp_size)
    full, sections = full_span(hidden), block.sections(1)
    projections = (("in_proj_qkvz", ("qkv", "z"), sections[:4]), ("in_proj_ba", ("b", "a"), sections[4:]))
    for name, tensors, sizes in projections:
        if block.grouped:
            yield _equal(f"{name}.weight", sum(sizes), rank, full)
        else:
            parts = _shares(f"in_proj_{tensors[0]}.weight", sizes[:-1], rank)
            parts += _shares(f"in_proj_{tensors[1]}.weight", sizes[-1:], rank)
            yield stacked(f"{PREFIX}.{name}.weight", parts, full)
    conv = _shares("conv1d.weight", sections[:3], rank)
    yield stacked(f"{PREFIX}.conv1d.weight", conv, full_span(1), full_span(block.conv_width))
    for name in ("dt_bias", "A_log"):
        yield _equal(name, block.value_heads, rank)
    norm = f"{PREFIX}.norm.weight"
    yield stacked(norm, [(norm, full_span(block.value_dim))])
    out = f"{PREFIX}.out_proj.weight"
    yield stacked(out, [(out, full)], rank.span(block.value_size, block.value_size))


def _equal(name: str, rows: int, rank: TpRank, *rest: Span) -> ServerParameter:
    """The rank's equal share of a tensor's rows."""
    return stacked(f"{PREFIX}.{name}", [(f"{PREFIX}.{name}", rank.span(rows, rows))], *rest)


def _shares(name: str, sections: tuple[int, ...], rank: TpRank) -> list[tuple[str, Span]]:
    """The rank's share of each section of a tensor's rows."""
    result, first, total = [], 0, sum(sections)
    for size in sections:
        share = size // rank.tp_size
        result.append((f"{PREFIX}.{name}", Span(first + rank.tp_rank * share, share, total)))
        first += size
    return result
