"""Quantised weights in a plan: beside each box of a weight, the boxes of the tensors that stand for it.

A box of scales has an entry per block, at the block's number along rows and columns. So a rank's box of a weight must
begin and end between blocks: else two ranks would share a scale that neither can compute alone. Scales of whole rows
are held by every rank with a part of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megarl.families.weight_formats import WEIGHT, WHOLE, WHOLE_ROWS, Piece, ServedFormat, is_expert
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.reshard.plan.holdings import Box, Holdings
from megarl.reshard.plan.sglang_blocks import ParameterPart, ServerParameter, TpRank


def box_of(piece: Piece, box: Box, quantization: str, whose: str) -> Box:
    """The box of a format's piece for a weight's box, which `whose` ranks hold.

    Raises:
        UserError: the box cuts a block.
    """
    first, last = [], []
    for dim, (start, stop, block) in enumerate(zip(box.start, box.stop, piece.block, strict=True)):
        if block == WHOLE:
            start, stop, block = 0, 1, 1
        may_end_inside = dim == 0 and box.name.endswith(WHOLE_ROWS)
        if start % block or (stop % block and not may_end_inside):
            sizes = "an etp_size or sglang.ep_size" if is_expert(box.name) else "a tensor-parallel size"
            raise UserError(
                f"server.quantization={quantization} has blocks of {' x '.join(map(str, piece.block))}, and {whose} "
                f"hold {('rows', 'columns')[dim]} {start} to {stop} of {box.name}, no whole blocks; take {sizes} "
                f"that leaves multiples of {block}, or set server.quantization=none"
            )
        first.append(start // block)
        last.append(-(-stop // block))
    return Box(box.name.removesuffix(WEIGHT) + piece.suffix, tuple(first), tuple(last))


def boxes_of(box: Box, format: ServedFormat, whose: str) -> list[Box]:
    """Boxes of all tensors that stand for a weight's box, in the order of `format.pieces`.

    Raises:
        UserError: see `box_of`.
    """
    scales_first = [box_of(piece, box, format.name, whose) for piece in reversed(format.pieces)]  # the larger blocks
    return scales_first[::-1]


def quantised_parameters(parameter: ServerParameter, format: ServedFormat, rank: TpRank) -> Iterator[ServerParameter]:
    """Yields the tensors that a quantised server holds for a parameter: itself, or the format's pieces.

    The first dimension of experts' parameters counts them, in each piece.

    Raises:
        UserError: the ranks cut a block.
    """
    if not any(format.quantises(part.box.name) for part in parameter.parts):
        yield parameter
        return
    whose = f"server ranks at server.tp_size={rank.tp_size}"
    if rank.ep_size > 1:
        whose += f" and sglang.ep_size={rank.ep_size}"
    lead = len(parameter.shape) - 2
    of_pieces = zip(*(boxes_of(part.box, format, whose) for part in parameter.parts), strict=True)
    for piece, boxes in zip(format.pieces, of_pieces, strict=True):
        parts = []
        for part, box in zip(parameter.parts, boxes, strict=True):
            corner = zip(part.at[lead:], piece.block, strict=True)
            at = [(0, 1) if block == WHOLE else (x, block) for x, block in corner]
            if any(x % block for x, block in at):
                raise UserError(
                    f"server.quantization={format.name} has blocks of {' x '.join(map(str, piece.block))}, and {whose} "
                    f"hold {part.box.name} behind padding at {part.at} of {parameter.name}; lower server.tp_size, or "
                    "set server.quantization=none"
                )
            parts.append(ParameterPart((*part.at[:lead], *(x // block for x, block in at)), box))
        name = parameter.name.removesuffix("weight") + piece.suffix.removeprefix(".")
        rows, columns = parameter.shape[lead:]
        yield ServerParameter(name, (*parameter.shape[:lead], *piece.shape(rows, columns)), tuple(parts))


def merged(boxes: Sequence[Box], format: ServedFormat, whose: str) -> Box:
    """The box that a rank's disjoint boxes of one weight fill together.

    Raises:
        UserError: they leave gaps, or the whole cuts a block.
    """
    corners = np.array([[box.start, box.stop] for box in boxes], dtype=np.int64)
    start, stop = corners[:, 0].min(axis=0), corners[:, 1].max(axis=0)
    whole = Box(boxes[0].name, tuple(start.tolist()), tuple(stop.tolist()))
    if np.prod(corners[:, 1] - corners[:, 0], axis=1).sum() != np.prod(stop - start):
        raise UserError(
            f"server.quantization={format.name} needs each trainer rank's part of a weight in one piece, and {whose} "
            f"hold {len(boxes)} pieces of {whole.name} with gaps; lower the tensor-parallel size, or set "
            "server.quantization=none"
        )
    boxes_of(whole, format, whose)
    return whole


def quantised_sources(sources: Holdings, format: ServedFormat, parallel: ParallelConfig) -> Holdings:
    """Holdings of trainer ranks that quantise their parts before they send them.

    Each rank's boxes of a weight become one, and the boxes of the format's pieces replace it.

    Raises:
        UserError: the trainer's ranks cut a block.
    """
    ranks = {
        False: f"trainer ranks at parallel.tp_size={parallel.tp_size}",
        True: f"trainer ranks at parallel.etp_size={parallel.expert_tp_size}",
    }
    rows: list[tuple[Box, str, int]] = []
    for holder in range(len(sources.holders)):
        grouped: dict[str, list[Box]] = {}
        for row in np.flatnonzero(sources.holder == holder).tolist():
            name = sources.names[sources.tensor[row]]
            dims = 2 if format.quantises(name) else None
            box = Box(name, tuple(sources.start[row].tolist()[:dims]), tuple(sources.stop[row].tolist()[:dims]))
            grouped.setdefault(name, []).append(box)
        plain = sources.dtypes[0]
        for name, boxes in grouped.items():
            if format.quantises(name):
                whose = ranks[is_expert(name)]
                boxes = boxes_of(merged(boxes, format, whose), format, whose)
            rows += [(box, format.dtype_of(box.name, plain), holder) for box in boxes]
    return Holdings.of_rows(rows, sources.holders)
