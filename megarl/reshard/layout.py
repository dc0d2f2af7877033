"""Where a piece of a weight lives. Every tensor has one coordinate space: that of the HF checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, order=True)
class Box:
    """The part `[start, stop)` along every dimension of the checkpoint tensor `name`."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            a < 0 or a >= b for a, b in zip(self.start, self.stop, strict=True)
        ):
            raise ValueError(f"{self.name}: [{self.start}, {self.stop}) is not a box")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    def of(self, tensor: Tensor) -> Tensor:
        """The view of the whole checkpoint tensor that this box covers."""
        if tensor.dim() != len(self.stop) or any(b > size for b, size in zip(self.stop, tensor.shape, strict=True)):
            raise ValueError(f"{self.name} has shape {tuple(tensor.shape)}, and the box ends at {self.stop}")
        return tensor[tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))]


@dataclass(frozen=True)
class Fragment:
    """What rank `rank` holds of a checkpoint tensor: `view`, a part of its parameter `tensor`, equals `box`."""

    rank: int
    tensor: str
    box: Box
    view: Tensor

    def __post_init__(self) -> None:
        if tuple(self.view.shape) != self.box.shape:
            raise ValueError(f"{self.tensor} shows {tuple(self.view.shape)} where {self.box} has {self.box.shape}")
