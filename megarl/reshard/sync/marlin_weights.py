"""Plain copies of 4-bit weights that SGLang keeps in Marlin's arrangement on GPUs, for the time of a sync.

After loading, SGLang's layers of compressed-tensors have `weight_packed` and `weight_scale` permuted for the Marlin
kernel (`gptq_marlin_repack`, `marlin_permute_scales`). The permutations are exact, and each has its inverse here. A
sync writes the plain copies. Then the live tensors are written from them, and read again before digests are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megarl.families.weight_formats import GROUP, PACKED
from megarl.ops.quantize import codes_of

TILE_ROWS, TILE_COLUMNS = 64, 16  # of a weight [rows, columns], in one tile of Marlin
CODES, SCALES = "weight_packed", "weight_scale"


def packed(codes: Tensor) -> Tensor:
    """Packs 4-bit codes, uint8 `[..., words * 8]`; the inverse of `codes_of`."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).contiguous().view(torch.int32)


def to_marlin(words: Tensor) -> Tensor:
    """Permutes packed codes, int32 `[rows, columns / 8]`, to Marlin's `[columns / 16, rows * 2]`.

    A tile has 64 rows and 16 columns. Its words go by row within 8, then by pair of columns, then by 16 rows. The codes
    of a word go by parity of the column, then by 8 rows, then by 8 columns.
    """
    rows, columns = words.shape[0], words.shape[1] * PACKED
    tiles = codes_of(words).view(rows // TILE_ROWS, 4, 2, 8, columns // TILE_COLUMNS, 2, 4, 2)
    return packed(tiles.permute(4, 0, 3, 6, 1, 7, 2, 5).reshape(columns // TILE_COLUMNS, rows * TILE_COLUMNS))


def from_marlin(arranged: Tensor) -> Tensor:
    """Permutes packed codes back to `[rows, columns / 8]`; the inverse of `to_marlin`."""
    rows, columns = arranged.shape[1] * PACKED // TILE_COLUMNS, arranged.shape[0] * TILE_COLUMNS
    tiles = codes_of(arranged).view(columns // TILE_COLUMNS, rows // TILE_ROWS, 8, 4, 4, 2, 2, 2)
    return packed(tiles.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(rows, columns))


def permuted_scales(scales: Tensor) -> Tensor:
    """Permutes scales `[groups, rows]` as Marlin has them. It is its own inverse.

    With several groups, rows are transposed in squares of 8; with a single one, in squares of 4 pairs.
    """
    groups, rows = scales.shape
    square = (8, 8) if groups > 1 else (4, 4, 2)
    return scales.reshape(groups, -1, *square).transpose(2, 3).reshape(groups, rows)


@dataclass(frozen=True)
class MarlinLayer:
    """A layer's live tensors, and plain ones that have memory during a sync alone."""

    arranged: Tensor  # int32 [columns / 16, rows * 2]
    arranged_scales: Tensor  # [groups, rows]
    codes: Tensor  # int32 [rows, columns / 8]
    scales: Tensor  # [rows, groups]

    @classmethod
    def of(cls, arranged: Tensor, scales: Tensor) -> MarlinLayer:
        """Makes plain tensors, with memory and without values."""
        groups, rows = scales.shape
        codes = arranged.new_empty(rows, groups * GROUP // PACKED)
        return cls(arranged, scales, codes, scales.new_empty(rows, groups))

    def open(self) -> None:
        """Gives the plain tensors memory, and the live values."""
        for plain in (self.codes, self.scales):
            plain.untyped_storage().resize_(plain.numel() * plain.itemsize)
        self.read()

    def read(self) -> None:
        self.codes.copy_(from_marlin(self.arranged))
        self.scales.copy_(permuted_scales(self.arranged_scales).t())

    def write(self) -> None:
        self.arranged.copy_(to_marlin(self.codes))
        self.arranged_scales.copy_(permuted_scales(self.scales.t()))

    def close(self) -> None:
        """Frees the memory of the plain tensors. Views of them are valid again after the next `open`."""
        for plain in (self.codes, self.scales):
            plain.untyped_storage().resize_(0)


class MarlinWeights:
    """The layers of a live model that are in Marlin's arrangement. An `Arrangement` of `server_rank.py`.

    Views of the plain tensors can be made while they have memory: after `__init__` until `close`, and after `open`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, MarlinLayer] = {}  # by the name of the module
        for name, module in model.named_modules():
            scheme: Any = getattr(module, "scheme", None)
            if hasattr(module, CODES) and hasattr(scheme, "workspace"):  # made when SGLang rearranges a layer
                live = (getattr(module, tensor).detach() for tensor in (CODES, SCALES))
                self.layers[name] = MarlinLayer.of(*live)

    def plain(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields a model's parameters with the plain tensors in place of those that are rearranged."""
        for name, parameter in parameters:
            module, _, tensor = name.rpartition(".")
            layer = self.layers.get(module)
            if layer is not None and tensor in (CODES, SCALES):
                parameter = layer.codes if tensor == CODES else layer.scales
            yield name, parameter

    def open(self) -> None:
        """Reads the live tensors into plain ones."""
        for layer in self.layers.values():
            layer.open()

    def settle(self) -> None:
        """Writes the live tensors from the plain ones, and reads them again: digests then prove the live ones."""
        for layer in self.layers.values():
            layer.write()
            layer.read()

    def close(self) -> None:
        for layer in self.layers.values():
            layer.close()
