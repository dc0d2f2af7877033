"""Set operations on many boxes at once, as arrays: equal boxes, shared elements, and cuts of large boxes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megarl.reshard.plan.holdings import Ints

PAIRS_AT_ONCE = 2_000_000  # bounds the memory of a join


@dataclass(frozen=True, eq=False)
class BoxArray:
    """Box `i` is `[start[i], stop[i])` of tensor number `tensor[i]`; `start`, `stop [n, dims]`."""

    tensor: Ints
    start: Ints
    stop: Ints

    @property
    def volume(self) -> Ints:
        """Elements of each box, `[n]`."""
        return np.prod(self.stop - self.start, axis=1)

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, rows: Ints) -> BoxArray:
        return BoxArray(self.tensor[rows], self.start[rows], self.stop[rows])

    def text(self, row: int) -> str:
        """One box as text, such as `[0:16, 4:8]`."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start[row], self.stop[row], strict=True)) + "]"

    def distinct(self) -> tuple[BoxArray, Ints]:
        """The distinct boxes, sorted by tensor, and for every box the index of its equal among them."""
        rows, index = distinct_rows(np.column_stack([self.tensor, self.start, self.stop]))
        return self[rows], index


def distinct_rows(keys: Ints) -> tuple[Ints, Ints]:
    """The sorted distinct rows of a matrix: (row number of each, for every row the index of its equal)."""
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    index = np.empty(len(keys), dtype=np.int64)
    index[order] = np.cumsum(new) - 1
    return order[new], index


def sum_by(index: Ints, values: Ints, size: int) -> Ints:
    """`[size]`: the sum of the values of each index, exact in int64."""
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, values)
    return total


def within_groups(counts: Ints) -> Ints:
    """0, 1, ... within each group of consecutive entries: `[2, 3]` gives `[0, 1, 0, 1, 2]`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def overlaps(blocks: BoxArray, boxes: BoxArray) -> tuple[Ints, Ints, Ints, Ints]:
    """All pairs of a block and a box that share elements: (block, box, start, stop). `blocks` is sorted by tensor."""
    batches = list(_overlap_batches(blocks, boxes))
    block, box, start, stop = (np.concatenate(column) for column in zip(*batches, strict=True))
    return block, box, start, stop


def _overlap_batches(blocks: BoxArray, boxes: BoxArray) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
    """Joins about `PAIRS_AT_ONCE` pairs at a time."""
    tensors = int(max(blocks.tensor.max(initial=0), boxes.tensor.max(initial=0))) + 1
    first = np.searchsorted(blocks.tensor, np.arange(tensors + 1))
    counts = np.diff(first)[boxes.tensor]
    cuts = np.flatnonzero(np.diff(np.cumsum(counts) // PAIRS_AT_ONCE)) + 1
    for batch in np.split(np.arange(len(boxes)), cuts):
        box = np.repeat(batch, counts[batch])
        block = first[boxes.tensor[box]] + within_groups(counts[batch])
        start = np.maximum(blocks.start[block], boxes.start[box])
        stop = np.minimum(blocks.stop[block], boxes.stop[box])
        shared = (start < stop).all(axis=1)
        yield block[shared], box[shared], start[shared], stop[shared]


def union_volume(boxes: BoxArray) -> int:
    """Elements in at least one of the boxes, all of one tensor, counted on the grid of their edges."""
    dims = boxes.start.shape[1]
    edges = [np.unique(np.concatenate([boxes.start[:, d], boxes.stop[:, d]])) for d in range(dims)]
    begin = np.column_stack([np.searchsorted(edges[d], boxes.start[:, d]) for d in range(dims)])
    end = np.column_stack([np.searchsorted(edges[d], boxes.stop[:, d]) for d in range(dims)])
    inside = np.zeros([len(e) - 1 for e in edges], dtype=np.int64)
    for a, b in zip(begin, end, strict=True):
        inside[tuple(slice(*ab) for ab in zip(a, b, strict=True))] = 1
    for d, e in enumerate(edges):
        inside = inside * np.diff(e).reshape([-1 if i == d else 1 for i in range(dims)])
    return int(inside.sum())


def split(start: Ints, stop: Ints, itemsize: Ints, max_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Cuts boxes of more than `max_bytes` along the first dimension, then the next: (index of the box, start, stop)."""
    origin = np.arange(len(start))
    for d in range(start.shape[1]):
        shape = stop - start
        inner = np.prod(shape[:, d + 1 :], axis=1) * itemsize[origin]
        step = np.where(inner * shape[:, d] > max_bytes, np.maximum(1, max_bytes // inner), shape[:, d])
        counts = -(-shape[:, d] // step)
        cut = np.repeat(np.arange(len(origin)), counts)
        end = stop[cut, d]
        origin, start, stop = origin[cut], start[cut], stop[cut]
        start[:, d] += within_groups(counts) * step[cut]
        stop[:, d] = np.minimum(start[:, d] + step[cut], end)
    return origin, start, stop
