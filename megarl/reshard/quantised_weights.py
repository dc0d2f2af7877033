"""The trainer's weights in block FP8, as a source of weight syncs: quantised where they are, before they are sent.

Each rank quantises its own parts, at each sync, into buffers that stay: a byte per weight, beside the trainer's own.
A plan, its digests and deltas then see tensors in 8 bits and their scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.families.block_fp8 import BLOCK, SCALE, in_fp8
from megarl.ops.quantize import FP8, quantize_fp8, scales_shape
from megarl.reshard.plan.block_fp8 import merged, scales_of
from megarl.reshard.plan.holdings import Box, read
from megarl.reshard.session import WeightSource
from megarl.reshard.sync.trainer_rank import ShardView

BLOCKS = (BLOCK, BLOCK)


@dataclass(frozen=True)
class QuantisedShard:
    """A box of quantised weights or of their scales, as a `ShardView`."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    view: Tensor


class QuantisedWeights:
    """A `WeightSource` with the linear layers of another one in block FP8; its other tensors stay as they are."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # values and scales of this rank's part of each weight

    def shards(self) -> Sequence[ShardView]:
        """Quantises this rank's parts. The views are of the same memory at each call."""
        plain: list[ShardView] = []
        of_weight: dict[str, list[ShardView]] = {}
        for shard in self.source.shards():
            if in_fp8(shard.name):
                of_weight.setdefault(shard.name, []).append(shard)
            else:
                plain.append(shard)
        return [*plain, *(part for shards in of_weight.values() for part in self._quantised(shards))]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of the quantised checkpoint."""
        return quantised(self.source.named_weights())

    def _quantised(self, shards: Sequence[ShardView]) -> Iterator[QuantisedShard]:
        """Quantises one weight's shards on this rank, as one box, and yields its values and scales.

        Raises:
            UserError: see `merged`.
        """
        name, whose = shards[0].name, "trainer ranks"
        box = merged([Box(name, shard.start, shard.stop) for shard in shards], whose)
        scale_box = scales_of(box, whose)
        if len(shards) == 1:
            weight = read(shards[0].view).detach()
        else:  # Megatron has the rows of query groups between each other
            parts = [read(shard.view).detach() for shard in shards]
            weight = parts[0].new_empty(box.shape)
            for shard, part in zip(shards, parts, strict=True):
                corners = zip(shard.start, shard.stop, box.start, strict=True)
                weight[tuple(slice(a - c, b - c) for a, b, c in corners)] = part
        if name not in self._buffers:
            self._buffers[name] = buffers_for(weight)
        values, scales = self._buffers[name]
        quantize_fp8(weight, BLOCKS, values, scales)
        yield QuantisedShard(name, box.start, box.stop, values)
        yield QuantisedShard(scale_box.name, scale_box.start, scale_box.stop, scales)


def buffers_for(weight: Tensor) -> tuple[Tensor, Tensor]:
    """New memory for the values and the scales of a weight."""
    shape = scales_shape((weight.shape[0], weight.shape[1]), BLOCKS)
    return (
        torch.empty(weight.shape, dtype=FP8, device=weight.device),
        torch.empty(shape, dtype=torch.float32, device=weight.device),
    )


def quantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a checkpoint with its linear layers in block FP8, each followed by its scales."""
    for name, tensor in tensors:
        if not in_fp8(name):
            yield name, tensor
            continue
        values, scales = buffers_for(tensor)
        quantize_fp8(tensor, BLOCKS, values, scales)
        yield name, values
        yield name + SCALE, scales
