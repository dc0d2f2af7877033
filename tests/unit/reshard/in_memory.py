"""Runs a plan in memory (pack, hand over, unpack) and compares the outcome with the full tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.reshard.plan.holdings import Box, Holdings
from megarl.reshard.plan.transfer_plan import RankMessage, TransferPlan


def checkpoint_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random tensors; their elements need more bits than bfloat16 has, so that a misplaced cast shows."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator, dtype=torch.float64) + 1 for name, shape in shapes.items()}


def boxes_of(side: Holdings, rank: int, checkpoint: Mapping[str, Tensor]) -> list[tuple[Box, torch.dtype]]:
    """The fragments of one rank, in its own order."""
    boxes = []
    for row in side.rows_of(rank):
        name = side.names[side.tensor[row]]
        dims = checkpoint[name].dim()
        start, stop = side.start[row].tolist(), side.stop[row].tolist()
        assert start[dims:] == [0] * (len(start) - dims)
        assert stop[dims:] == [1] * (len(start) - dims)
        boxes.append((Box(name, tuple(start[:dims]), tuple(stop[:dims])), getattr(torch, side.dtypes[side.dtype[row]])))
    return boxes


def check_delivery(transfer_plan: TransferPlan, checkpoint: Mapping[str, Tensor]) -> None:
    """Asserts that every element of every destination is written once, with the right bits, in the plan's order.

    Buckets must be bounded and have no gaps. A relay packs what it holds when its message's turn comes.
    """
    ranks = range(len(transfer_plan.topology.node))
    boxes = [boxes_of(transfer_plan.destinations, rank, checkpoint) for rank in ranks]
    held = [[torch.full(box.shape, -1.0, dtype=dtype) for box, dtype in of_rank] for of_rank in boxes]
    trained = [
        [box.of(checkpoint[box.name]) for box, _ in boxes_of(transfer_plan.sources, rank, checkpoint)]
        for rank in range(len(transfer_plan.topology.source_node))
    ]
    outgoing = {m.index: (trained[rank], m) for rank in range(len(trained)) for m in transfer_plan.sends(rank)}
    outgoing |= {m.index: (held[rank], m) for rank in ranks for m in transfer_plan.forwards(rank)}
    incoming = {m.index: (held[rank], m) for rank in ranks for m in transfer_plan.receives(rank)}
    assert sorted(outgoing) == sorted(incoming) == list(range(len(transfer_plan.messages.bucket)))
    for index in range(len(incoming)):
        (views, sent), (targets, message) = outgoing[index], incoming[index]
        wire, at = packed(views, sent), 0
        assert message.relayed == sent.relayed
        for i in range(len(message)):
            target = part_of(targets[message.fragment[i]], message.start[i], message.stop[i])
            assert (target == -1).all(), "an element is written twice"
            size = target.numel() * target.element_size()
            assert message.offset[i] == at, "a gap in the bucket"
            assert target.dtype == getattr(torch, message.dtype[i])
            target.copy_(wire[at : at + size].view(target.dtype).view(target.shape))
            at += size
        assert at == len(wire) == message.nbytes <= transfer_plan.bucket_bytes
    for of_rank, fragments in zip(boxes, held, strict=True):
        for (box, dtype), fragment in zip(of_rank, fragments, strict=True):
            assert torch.equal(fragment, box.of(checkpoint[box.name]).to(dtype)), box


def packed(fragments: Sequence[Tensor], message: RankMessage) -> Tensor:
    """Bytes of a message from its sender's fragments."""
    wire = torch.empty(message.nbytes, dtype=torch.uint8)
    for i in range(len(message)):
        piece = part_of(fragments[message.fragment[i]], message.start[i], message.stop[i])
        raw = piece.to(getattr(torch, message.dtype[i])).contiguous().flatten().view(torch.uint8)
        wire[message.offset[i] : message.offset[i] + raw.numel()] = raw
    return wire


def part_of(tensor: Tensor, start: np.ndarray, stop: np.ndarray) -> Tensor:
    """A part of a fragment; a plan's boxes may have more dimensions than the tensor."""
    assert (start[tensor.dim() :] == 0).all()
    assert (stop[tensor.dim() :] == 1).all()
    return tensor[tuple(slice(a, b) for a, b in zip(start[: tensor.dim()], stop, strict=False))]
