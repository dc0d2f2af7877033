"""Runs a plan in memory (pack, hand over, unpack) and compares the outcome with the full tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from megarl.reshard.plan.holdings import Box, Holdings
from megarl.reshard.plan.transfer_plan import TransferPlan


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
    """Asserts that every element of every destination is written once, with the right bits.

    Buckets must be bounded and have no gaps.
    """
    wires = dict(packed(transfer_plan, checkpoint))
    for rank in range(len(transfer_plan.topology.node)):
        boxes = boxes_of(transfer_plan.destinations, rank, checkpoint)
        held = [torch.full(box.shape, -1.0, dtype=dtype) for box, dtype in boxes]
        for message in transfer_plan.receives(rank):
            wire, at = wires.pop(message.index), 0
            for i in range(len(message)):
                target = part_of(held[message.fragment[i]], message.start[i], message.stop[i])
                assert (target == -1).all(), "an element is written twice"
                size = target.numel() * target.element_size()
                assert message.offset[i] == at, "a gap in the bucket"
                assert target.dtype == getattr(torch, message.dtype[i])
                target.copy_(wire[at : at + size].view(target.dtype).view(target.shape))
                at += size
            assert at == len(wire) == message.nbytes <= transfer_plan.bucket_bytes
        for (box, dtype), fragment in zip(boxes, held, strict=True):
            assert torch.equal(fragment, box.of(checkpoint[box.name]).to(dtype)), box
    assert not wires, "a message that nobody receives"


def packed(transfer_plan: TransferPlan, checkpoint: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Bytes of every message, by its place in the global order."""
    wires: dict[int, Tensor] = {}
    for rank in range(len(transfer_plan.topology.source_node)):
        boxes = boxes_of(transfer_plan.sources, rank, checkpoint)
        for message in transfer_plan.sends(rank):
            wire = torch.empty(message.nbytes, dtype=torch.uint8)
            for i in range(len(message)):
                box, _ = boxes[message.fragment[i]]
                piece = part_of(box.of(checkpoint[box.name]), message.start[i], message.stop[i])
                raw = piece.to(getattr(torch, message.dtype[i])).contiguous().flatten().view(torch.uint8)
                wire[message.offset[i] : message.offset[i] + raw.numel()] = raw
            wires[message.index] = wire
    return wires


def part_of(tensor: Tensor, start: np.ndarray, stop: np.ndarray) -> Tensor:
    """A part of a fragment; a plan's boxes may have more dimensions than the tensor."""
    assert (start[tensor.dim() :] == 0).all()
    assert (stop[tensor.dim() :] == 1).all()
    return tensor[tuple(slice(a, b) for a, b in zip(start[: tensor.dim()], stop, strict=False))]
