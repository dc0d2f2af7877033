"""A shard of a HF tensor on a rank, and the cuts that tensor parallelism makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A shard: the box `[start, stop)` of a HF tensor, stored in a native parameter from index `at` on.

    `shape`, `start`, `stop` and `at` are in elements, with one entry per dimension of the tensor.
    """

    name: str  # of the HF tensor
    shape: tuple[int, ...]  # of the full HF tensor
    start: tuple[int, ...]
    stop: tuple[int, ...]
    stage: int  # virtual pipeline stage on the rank; the number of these for layers of multi-token prediction
    param: str  # parameter's name in the stage's module, under Megatron's local layer spec
    at: tuple[int, ...]
    float32: bool = False  # True: the parameter is float32 in bfloat16 models too

    @property
    def index(self) -> tuple[slice, ...]:
        """Slices of the shard in its native parameter."""
        return tuple(slice(p, p + b - a) for p, a, b in zip(self.at, self.start, self.stop, strict=True))


class Stage:
    """Builds the shards of one virtual stage, on tensor-parallel rank `rank` of `size`."""

    def __init__(self, stage: int, rank: int, size: int) -> None:
        self.stage, self.rank, self.size = stage, rank, size

    def rows(self, name: str, param: str, shape: tuple[int, ...], first: int, count: int, at: int = 0) -> ShardSpec:
        """Shard of rows `[first, first + count)` of the HF tensor, from row `at` of the parameter on."""
        zeros = (0,) * (len(shape) - 1)
        return ShardSpec(name, shape, (first, *zeros), (first + count, *shape[1:]), self.stage, param, (at, *zeros))

    def replicated(self, name: str, param: str, *shape: int) -> ShardSpec:
        """Shard of the full tensor, replicated on every rank."""
        return self.rows(name, param, shape, 0, shape[0])

    def share_of_rows(self, name: str, param: str, height: int, width: int) -> ShardSpec:
        """Shard of the rank's equal share of the rows."""
        share = height // self.size
        return self.rows(name, param, (height, width), self.rank * share, share)

    def columns(self, name: str, param: str, height: int, width: int) -> ShardSpec:
        """Shard of the rank's equal share of the columns."""
        share = width // self.size
        first = self.rank * share
        return ShardSpec(name, (height, width), (0, first), (height, first + share), self.stage, param, (0, 0))

    def gated(self, names: tuple[str, str], param: str, height: int, width: int) -> Iterator[ShardSpec]:
        """Yields the shards of the rank's gate rows, then of its up rows."""
        share = height // self.size
        for i, name in enumerate(names):
            yield self.rows(name, param, (height, width), self.rank * share, share, at=i * share)

    def vocabulary(self, name: str, param: str, vocab: int, padded: int, hidden: int) -> Iterator[ShardSpec]:
        """Yields the shard of the rank's rows of the vocabulary, of `padded` rows, unless they are all padding."""
        share = padded // self.size
        first = self.rank * share
        if first < vocab:
            yield self.rows(name, param, (vocab, hidden), first, min(share, vocab - first))
