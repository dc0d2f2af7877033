"""The trainer's weights in a server's format, as a source of weight syncs: quantised where they are, before sending.

Each rank quantises its own parts, at each sync, into buffers that stay: a byte per weight, beside the trainer's own.
A plan, its digests and deltas then see tensors in 8 bits and their scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.families.weight_formats import WHOLE, WeightFormat
from megarl.ops.quantize import quantize_fp8, scale_of
from megarl.reshard.plan.holdings import Box, read
from megarl.reshard.plan.quantised import boxes_of, merged
from megarl.reshard.session import WeightSource
from megarl.reshard.sync.trainer_rank import ShardView


@dataclass(frozen=True)
class QuantisedShard:
    """A box of quantised weights or of their scales, as a `ShardView`."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    view: Tensor


class QuantisedWeights:
    """A `WeightSource` with the linear layers of another one in `format`; its other tensors stay as they are.

    The ranks of `tp` hold parts of the same rows. Where a scale is of a whole row, `shards` is a collective over them.
    """

    def __init__(self, source: WeightSource, format: WeightFormat, tp: dist.ProcessGroup | None = None) -> None:
        self.source, self.format = source, format
        self._tp = tp
        self._buffers: dict[str, list[Tensor]] = {}  # the format's pieces of this rank's part of each weight

    def shards(self) -> Sequence[ShardView]:
        """Quantises this rank's parts. The views are of the same memory at each call."""
        plain: list[ShardView] = []
        of_weight: dict[str, list[ShardView]] = {}
        for shard in self.source.shards():
            if self.format.quantises(shard.name):
                of_weight.setdefault(shard.name, []).append(shard)
            else:
                plain.append(shard)
        shared = self._share_scales(of_weight)
        return [
            *plain, *(part for name, shards in of_weight.items() for part in self._quantised(shards, name in shared))
        ]  # fmt: skip

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of the quantised checkpoint."""
        return quantised(self.source.named_weights(), self.format)

    def _share_scales(self, of_weight: dict[str, list[ShardView]]) -> set[str]:
        """Fills in the scales of the weights whose rows ranks share, and returns the weights' names."""
        if self._tp is None or self._tp.size() == 1 or not self.format.scales.of_whole_rows:
            return set()
        names = [name for name in of_weight if shares_rows(name)]
        if names:
            weights = [self._weight(of_weight[name])[1] for name in names]
            rows = torch.cat([weight.abs().amax(dim=1).float() for weight in weights])
            dist.all_reduce(rows, dist.ReduceOp.MAX, group=self._tp)
            of_weights = rows.split([len(weight) for weight in weights])
            for name, weight, largest in zip(names, weights, of_weights, strict=True):
                self._buffers_of(name, weight)[1].copy_(scale_of(largest)[:, None])
        return set(names)

    def _weight(self, shards: Sequence[ShardView]) -> tuple[Box, Tensor]:
        """One weight's shards on this rank, as one box.

        Raises:
            UserError: see `merged`.
        """
        box = merged([Box(shard.name, shard.start, shard.stop) for shard in shards], self.format, "trainer ranks")
        if len(shards) == 1:
            return box, read(shards[0].view).detach()
        # Megatron has the rows of query groups between each other.
        parts = [read(shard.view).detach() for shard in shards]
        weight = parts[0].new_empty(box.shape)
        for shard, part in zip(shards, parts, strict=True):
            corners = zip(shard.start, shard.stop, box.start, strict=True)
            weight[tuple(slice(a - c, b - c) for a, b, c in corners)] = part
        return box, weight

    def _quantised(self, shards: Sequence[ShardView], has_scales: bool) -> Iterator[QuantisedShard]:
        """Quantises one weight's shards on this rank, and yields the format's pieces."""
        box, weight = self._weight(shards)
        buffers = self._buffers_of(box.name, weight)
        quantise(weight, self.format, buffers, has_scales)
        for piece, buffer in zip(boxes_of(box, self.format, "trainer ranks"), buffers, strict=True):
            yield QuantisedShard(piece.name, piece.start, piece.stop, buffer)

    def _buffers_of(self, name: str, weight: Tensor) -> list[Tensor]:
        if name not in self._buffers:
            self._buffers[name] = buffers_for(weight, self.format)
        return self._buffers[name]


def shares_rows(name: str) -> bool:
    """True for the weights whose columns tensor parallelism cuts: the output projections of attention and MLP."""
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def buffers_for(weight: Tensor, format: WeightFormat) -> list[Tensor]:
    """New memory for the format's pieces of a weight."""
    return [
        torch.empty(piece.shape(*weight.shape), dtype=getattr(torch, piece.dtype), device=weight.device)
        for piece in format.pieces
    ]


def quantise(weight: Tensor, format: WeightFormat, pieces: Sequence[Tensor], has_scales: bool = False) -> None:
    """Writes the pieces of a weight. With `has_scales` those are read, and the values follow from them."""
    values, scales = pieces
    rows, columns = format.scales.block
    quantize_fp8(weight, (rows, weight.shape[1] if columns == WHOLE else columns), values, scales, given=has_scales)


def quantised(tensors: Iterable[tuple[str, Tensor]], format: WeightFormat) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a checkpoint with its linear layers in `format`, each as the format's pieces."""
    for name, tensor in tensors:
        if not format.quantises(name):
            yield name, tensor
            continue
        pieces = buffers_for(tensor, format)
        quantise(tensor, format, pieces)
        yield from zip(format.names(name), pieces, strict=True)
