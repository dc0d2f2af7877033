"""The trainer's weights in a server's format, as a source of weight syncs: quantised where they are, before sending.

Each rank quantises its own parts, at each sync, into buffers that stay, beside the trainer's own weights. A plan, its
digests and deltas then see the quantised tensors and their scales.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.families.weight_formats import WEIGHT, ServedFormat
from megarl.ops.quantize import dequantise, new_pieces, quantise, scale_of
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

    def __init__(self, source: WeightSource, format: ServedFormat, tp: dist.ProcessGroup | None = None) -> None:
        self.source, self.format = source, format
        self._tp = tp
        self._buffers: dict[str, list[Tensor]] = {}  # the format's pieces of this rank's part of each weight

    def shards(self) -> Sequence[ShardView]:
        """Quantises this rank's parts. The views are of the same memory at each call."""
        plain, of_weight = self._grouped()
        parts: list[ShardView] = [*plain]
        scales = self._shared_scales(of_weight)
        for name, shards in of_weight.items():
            box, weight = self._weight(shards)
            if name not in self._buffers:
                self._buffers[name] = new_pieces(weight, self.format)
            pieces = self._buffers[name]
            self._quantise(weight, pieces, scales.get(name))
            boxes = boxes_of(box, self.format, "trainer ranks")
            parts += [QuantisedShard(b.name, b.start, b.stop, piece) for b, piece in zip(boxes, pieces, strict=True)]
        return parts

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of the quantised checkpoint."""
        return quantised(self.source.named_weights(), self.format)

    @contextlib.contextmanager
    def rounded(self) -> Iterator[None]:
        """Context in which the source's live weights are rounded to the values that servers compute with.

        They are put back at its end. Gradients of passes in it are of the rounded weights, and an optimizer that takes
        them steps the full ones: quantisation-aware training by the straight-through estimator (arXiv:1308.3432).
        """
        of_weight = self._grouped()[1]
        scales = self._shared_scales(of_weight)
        kept: list[tuple[Tensor, Tensor]] = []
        try:
            for name, shards in of_weight.items():
                box, weight = self._weight(shards)
                pieces = new_pieces(weight, self.format)
                self._quantise(weight, pieces, scales.get(name))
                values = dequantise(self.format, pieces, weight.dtype)
                for shard, part in zip(shards, parts_of(box, shards, values), strict=True):
                    assert isinstance(shard.view, Tensor), "served_checks.py refuses adapters"
                    view = shard.view.detach()
                    kept.append((view, view.clone()))
                    view.copy_(part)
            yield
        finally:
            for view, values in kept:
                view.copy_(values)

    def _grouped(self) -> tuple[list[ShardView], dict[str, list[ShardView]]]:
        """Splits the source's shards: what stays as it is, and by weight what is quantised."""
        plain: list[ShardView] = []
        of_weight: dict[str, list[ShardView]] = {}
        for shard in self.source.shards():
            if self.format.quantises(shard.name):
                of_weight.setdefault(shard.name, []).append(shard)
            else:
                plain.append(shard)
        return plain, of_weight

    def _shared_scales(self, of_weight: dict[str, list[ShardView]]) -> dict[str, Tensor]:
        """Scales of the weights whose rows ranks share, by weight."""
        if self._tp is None or self._tp.size() == 1 or not self.format.scales.of_whole_rows:
            return {}
        shared = {name: shards for name, shards in of_weight.items() if shares_rows(name)}
        rows = {name: self._weight(shards)[1].abs().amax(dim=1).float() for name, shards in shared.items()}
        if not rows:
            return {}
        largest = torch.cat([*rows.values()])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._tp)
        scales = scale_of(largest)[:, None].split([len(of_one) for of_one in rows.values()])
        return dict(zip(rows, scales, strict=True))

    def _weight(self, shards: Sequence[ShardView]) -> tuple[Box, Tensor]:
        """One weight's shards on this rank, as one box.

        Raises:
            UserError: see `merged`.
        """
        box = merged([Box(shard.name, shard.start, shard.stop) for shard in shards], self.format, "trainer ranks")
        if len(shards) == 1:
            return box, read(shards[0].view).detach()
        # Megatron has the rows of query groups between each other.
        values = [read(shard.view).detach() for shard in shards]
        weight = values[0].new_empty(box.shape)
        for part, of_shard in zip(parts_of(box, shards, weight), values, strict=True):
            part.copy_(of_shard)
        return box, weight

    def _quantise(self, weight: Tensor, pieces: Sequence[Tensor], scales: Tensor | None) -> None:
        if scales is not None:
            pieces[1].copy_(scales)
        quantise(weight, self.format, pieces, given=scales is not None)


def parts_of(box: Box, shards: Sequence[ShardView], values: Tensor) -> Iterator[Tensor]:
    """Yields each shard's view of the values of their common box."""
    for shard in shards:
        corners = zip(shard.start, shard.stop, box.start, strict=True)
        yield values[tuple(slice(a - c, b - c) for a, b, c in corners)]


def shares_rows(name: str) -> bool:
    """True for the weights whose columns tensor parallelism cuts: the output projections of attention and MLP."""
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def quantised(tensors: Iterable[tuple[str, Tensor]], format: ServedFormat) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a checkpoint with its linear layers in `format`, each as the format's pieces."""
    for name, tensor in tensors:
        if not format.quantises(name):
            yield name, tensor
            continue
        pieces = new_pieces(tensor, format)
        quantise(tensor, format, pieces)
        yield from zip(format.names(name), pieces, strict=True)
        if format.shape:
            yield name.removesuffix(WEIGHT) + format.shape, torch.tensor(tensor.shape)
