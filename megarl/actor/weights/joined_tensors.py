"""Joins tensors that come one after another into larger ones, as checkpoints hold all experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TensorPart:
    """Values of a part of the larger tensor `name`, and the place `index` in it, which has `count` parts."""

    name: str
    shape: tuple[int, ...]  # of the larger tensor
    index: tuple[Any, ...]
    values: Tensor
    count: int


def joined(
    tensors: Iterable[tuple[str, Tensor]], part_of: Callable[[str, Tensor], TensorPart | None]
) -> Iterator[tuple[str, Tensor]]:
    """Yields larger tensors once their parts have come, and those without a part as they are.

    The parts of a tensor must come together: incomplete ones stay in memory.
    """
    pending: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, tensor in tensors:
        part = part_of(name, tensor)
        if part is None:
            yield name, tensor
            continue
        if part.name not in pending:
            pending[part.name], missing[part.name] = tensor.new_empty(part.shape), part.count
        pending[part.name][part.index] = part.values
        missing[part.name] -= 1
        if not missing[part.name]:
            yield part.name, pending.pop(part.name)
    assert not pending, f"parts of {next(iter(pending))} are missing"
