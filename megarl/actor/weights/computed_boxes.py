"""Boxes of HF tensors that no memory of a rank holds as they are: merged with adapters, or stored in few bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Index = tuple[slice, ...]


class ComputedBox:
    """A box whose values are made when they are read, and not kept.

    So a merged or dequantised model is never in memory as a whole. A part is cut from the whole box's values: a
    product of another size could round otherwise.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, address: int, compute: Callable[[], Tensor], *parts: Index
    ) -> None:
        """`compute` makes the complete box, of which `parts` selects one after another. `address` is its memory's."""
        self.shape, self.dtype, self._address, self._compute, self._parts = shape, dtype, address, compute, parts

    def read(self) -> Tensor:
        """Makes the values, `shape`, of `dtype`."""
        values = self._compute()
        for part in self._parts:
            values = values[part]
        return values

    def __getitem__(self, index: Index) -> ComputedBox:
        """Selects a part along every dimension, by slices of step 1."""
        shape = tuple(len(range(*part.indices(size))) for part, size in zip(index, self.shape, strict=True))
        return ComputedBox(shape, self.dtype, self._address, self._compute, *self._parts, index)

    def detach(self) -> ComputedBox:
        """The box itself: what is read has no gradient."""
        return self

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def data_ptr(self) -> int:
        """Address of the memory from which the values are made, which tells whether it was allocated anew."""
        return self._address


View = Tensor | ComputedBox


def values_of(view: View) -> Tensor:
    """A box's values: the live tensor itself, or made now."""
    return view.read() if isinstance(view, ComputedBox) else view.detach()
