"""Copies from the host to a GPU: all tensors of a value at once, from pinned memory, without a wait.

CUDA may wait for earlier kernels before it copies memory that is not pinned. Pinned memory comes from torch's cache of
it, which gives a block out again only after the copies from it have ended.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes: kernels read up to 16 at once, and a cache line has 128

T = TypeVar("T")


class HoldsTensors:
    """Base of classes whose attributes are copied, as a dataclass's fields are."""


class OnHost:
    """A tensor that stays on the host when the value that holds it is copied."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def to_device(value: T, device: torch.device | str) -> T:
    """Copies a tensor, or a list, tuple, dict or dataclass with tensors in it, to `device`. Does not wait for a GPU.

    On a GPU, all tensors that come from the host share one block of memory, which one copy fills. It is allocated and
    filled on the current stream.
    """
    if torch.device(device).type != "cuda":
        return _mapped(value, lambda tensor: tensor.to(device))
    found: dict[int, Tensor] = {}  # by identity: a tensor that is held twice is copied once

    def find(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            found[id(tensor)] = tensor
        return tensor

    _mapped(value, find)
    arrived = dict(zip(found, _copied(list(found.values()), device), strict=True))
    return _mapped(value, lambda tensor: arrived[id(tensor)] if id(tensor) in arrived else tensor.to(device))


def _copied(tensors: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copies tensors of the host to a GPU, as views of one block."""
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
    staging = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)

    def part(memory: Tensor, start: int, like: Tensor) -> Tensor:
        view = memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
        return view.data  # its own version counter: a write to one part does not count as one to the others

    for start, tensor in zip(ends, tensors, strict=False):
        part(staging, start, tensor).copy_(tensor)
    block = staging.to(device, non_blocking=True)
    return [part(block, start, tensor) for start, tensor in zip(ends, tensors, strict=False)]


def _mapped(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """Copies the structure of `value`, with `of(tensor)` in place of each tensor."""
    if isinstance(value, Tensor):
        return of(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(part, of) for part in value])
    if isinstance(value, dict):
        return {key: _mapped(part, of) for key, part in value.items()}
    if isinstance(value, HoldsTensors) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        result = copy.copy(value)
        for name, part in vars(value).items():
            object.__setattr__(result, name, _mapped(part, of))  # frozen ones too
        return result
    return value
