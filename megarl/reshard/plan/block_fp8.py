"""Block FP8 in a plan: weights in 8 bits, and beside each box of a weight the box of its scales.

A box of scales has an entry per block, at the block's number along rows and columns. So a rank's box of a weight must
begin and end between blocks: else two ranks would share a scale that neither can compute alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megarl.families.block_fp8 import BLOCK, SCALE, in_fp8, is_scale
from megarl.knobs import UserError
from megarl.reshard.plan.holdings import Box, Holdings
from megarl.reshard.plan.sglang_blocks import ParameterPart, ServerParameter

FP8, SCALE_DTYPE = "float8_e4m3fn", "float32"


def dtype_named(name: str, plain: str) -> str:
    """Dtype of a tensor of a quantised model; `plain` is that of weights which stay as they are."""
    return SCALE_DTYPE if is_scale(name) else FP8 if in_fp8(name) else plain


def scales_of(box: Box, whose: str) -> Box:
    """The box of the scales of a weight's box, which `whose` ranks hold.

    Raises:
        UserError: the box cuts a block.
    """
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        if start % BLOCK or stop % BLOCK:
            raise UserError(
                f"server.quantization=fp8 has blocks of {BLOCK} x {BLOCK}, and {whose} hold {('rows', 'columns')[dim]} "
                f"{start} to {stop} of {box.name}, no whole blocks; take a tensor-parallel size that leaves multiples "
                f"of {BLOCK}, or set server.quantization=none"
            )
    first, last = (tuple(corner // BLOCK for corner in corners) for corners in (box.start, box.stop))
    return Box(box.name + SCALE, first, last)


def with_scales(parameter: ServerParameter, tp_size: int) -> Iterator[ServerParameter]:
    """Yields a parameter of a quantised server, and that of its scales if it is in FP8.

    Raises:
        UserError: the ranks cut a block.
    """
    yield parameter
    if not any(in_fp8(part.box.name) for part in parameter.parts):
        return
    whose = f"server ranks at server.tp_size={tp_size}"
    parts = []
    for part in parameter.parts:
        scales = scales_of(part.box, whose)
        if any(corner % BLOCK for corner in part.at):
            raise UserError(
                f"server.quantization=fp8 has blocks of {BLOCK} x {BLOCK}, and {whose} hold {part.box.name} behind "
                f"padding at {part.at} of {parameter.name}; lower server.tp_size, or set server.quantization=none"
            )
        parts.append(ParameterPart(tuple(corner // BLOCK for corner in part.at), scales))
    shape = tuple(-(-size // BLOCK) for size in parameter.shape)
    yield ServerParameter(parameter.name + SCALE, shape, tuple(parts))


def merged(boxes: Sequence[Box], whose: str) -> Box:
    """The box that a rank's disjoint boxes of one weight fill together.

    Raises:
        UserError: they leave gaps, or the whole cuts a block.
    """
    corners = np.array([[box.start, box.stop] for box in boxes], dtype=np.int64)
    start, stop = corners[:, 0].min(axis=0), corners[:, 1].max(axis=0)
    whole = Box(boxes[0].name, tuple(start.tolist()), tuple(stop.tolist()))
    if np.prod(corners[:, 1] - corners[:, 0], axis=1).sum() != np.prod(stop - start):
        raise UserError(
            f"server.quantization=fp8 needs each trainer rank's part of a weight in one piece, and {whose} hold "
            f"{len(boxes)} pieces of {whole.name} with gaps; lower the tensor-parallel size, or set "
            "server.quantization=none"
        )
    scales_of(whole, whose)
    return whole


def quantised_sources(sources: Holdings, tp_size: int) -> Holdings:
    """Holdings of trainer ranks that quantise their parts before they send them.

    Each rank's boxes of a weight become one, and its scales' box follows.

    Raises:
        UserError: the trainer's ranks cut a block.
    """
    whose = f"trainer ranks at parallel.tp_size={tp_size}"
    rows: list[tuple[Box, str, int]] = []
    for holder in range(len(sources.holders)):
        grouped: dict[str, list[Box]] = {}
        for row in np.flatnonzero(sources.holder == holder).tolist():
            name, dims = sources.names[sources.tensor[row]], 2 if in_fp8(sources.names[sources.tensor[row]]) else None
            box = Box(name, tuple(sources.start[row].tolist()[:dims]), tuple(sources.stop[row].tolist()[:dims]))
            grouped.setdefault(name, []).append(box)
        plain = sources.dtypes[0]
        for name, boxes in grouped.items():
            if in_fp8(name):
                whole = merged(boxes, whose)
                boxes = [whole, scales_of(whole, whose)]
            rows += [(box, dtype_named(box.name, plain), holder) for box in boxes]
    return Holdings.of_rows(rows, sources.holders)
