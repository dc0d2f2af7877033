"""Boxes of checkpoint tensors, and tables of the boxes that ranks hold.

Every tensor has one coordinate space, the HF checkpoint's. `Box` and `Fragment` describe one part, without and with its
live tensor. `Holdings` describes all ranks of one side as arrays, and is the planner's input for either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.families.adapters import is_adapter, wire_name

Ints = NDArray[np.int64]


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
        """View of this box in its full checkpoint tensor."""
        if tensor.dim() != len(self.stop) or any(b > size for b, size in zip(self.stop, tensor.shape, strict=True)):
            raise ValueError(f"{self.name} has shape {tuple(tensor.shape)}, and the box ends at {self.stop}")
        return tensor[tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))]


class ComputedValues(Protocol):
    """Values of a tensor's shape and dtype that are made when they are read, such as weights merged with adapters."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor: ...
    def __getitem__(self, index: tuple[slice, ...]) -> ComputedValues: ...
    def detach(self) -> ComputedValues: ...
    def dim(self) -> int: ...
    def numel(self) -> int: ...
    def data_ptr(self) -> int: ...


def read(view: Tensor | ComputedValues) -> Tensor:
    """Values of a view: the live tensor itself, or made now."""
    return view if isinstance(view, Tensor) else view.read()


@dataclass(frozen=True)
class Fragment:
    """A box held by rank `rank`: `view`, a part of its live parameter `tensor`, has the box's values.

    A trainer's view may compute its values: `read` gives them (`ComputedValues`).
    """

    rank: int
    tensor: str
    box: Box
    view: Any  # Tensor | ComputedValues

    def __post_init__(self) -> None:
        if tuple(self.view.shape) != self.box.shape:
            raise ValueError(
                f"the view of {self.tensor} has shape {tuple(self.view.shape)}, and {self.box} {self.box.shape}"
            )


def is_sent(name: str, adapters_only: bool) -> bool:
    """True if a sync brings the tensor up to date: any, or the adapters' alone."""
    return is_adapter(name) or not adapters_only


def sent(fragments: Sequence[Fragment], adapters_only: bool) -> list[Fragment]:
    """Lists the fragments that a sync brings up to date, in their order."""
    return [fragment for fragment in fragments if is_sent(fragment.box.name, adapters_only)]


@dataclass(frozen=True, eq=False)
class Holdings:
    """Boxes held by the ranks of one side: row `i` is one box, held by every rank of a set.

    Columns, each of `n` rows:

        tensor [n]            index into `names`
        start, stop [n, dims] in elements; `[0, 1)` in dimensions that a tensor lacks
        dtype [n]             index into `dtypes`, torch names such as "bfloat16"
        holder [n]            index into `holders`, sets of ranks; each rank of a set holds all rows of the set

    A rank may be in several sets, as dense and expert weights are spread differently. The fragments of one rank are its
    rows in the order of the table (`rows_of`).
    """

    names: tuple[str, ...]
    tensor: Ints
    start: Ints
    stop: Ints
    dtypes: tuple[str, ...]
    dtype: Ints
    holder: Ints
    holders: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(per_rank: Sequence[Sequence[tuple[Box, str]]]) -> Holdings:
        """Builds the table from each rank's list of (box, dtype), in the lists' order.

        Ranks with equal lists share rows.
        """
        sets: dict[tuple[tuple[Box, str], ...], list[int]] = {}
        for rank, boxes in enumerate(per_rank):
            sets.setdefault(tuple(boxes), []).append(rank)
        rows = [(box, dtype, holder) for holder, boxes in enumerate(sets) for box, dtype in boxes]
        return Holdings.of_rows(rows, tuple(tuple(ranks) for ranks in sets.values()))

    @staticmethod
    def of_rows(rows: Sequence[tuple[Box, str, int]], holders: tuple[tuple[int, ...], ...]) -> Holdings:
        """Builds the table from its rows (box, dtype, index into `holders`), in their order."""
        names = {name: i for i, name in enumerate(dict.fromkeys(box.name for box, _, _ in rows))}
        dtypes = {name: i for i, name in enumerate(dict.fromkeys(dtype for _, dtype, _ in rows))}
        dims = max((len(box.start) for box, _, _ in rows), default=1)

        def corners(values: Iterable[tuple[int, ...]], fill: int) -> Ints:
            filled = [(*value, *(fill,) * (dims - len(value))) for value in values]
            return np.array(filled, dtype=np.int64).reshape(len(rows), dims)

        return Holdings(
            names=tuple(names),
            tensor=np.array([names[box.name] for box, _, _ in rows], dtype=np.int64),
            start=corners((box.start for box, _, _ in rows), 0),
            stop=corners((box.stop for box, _, _ in rows), 1),
            dtypes=tuple(dtypes),
            dtype=np.array([dtypes[dtype] for _, dtype, _ in rows], dtype=np.int64),
            holder=np.array([holder for _, _, holder in rows], dtype=np.int64),
            holders=holders,
        )

    def rows_of(self, rank: int) -> Ints:
        """Rows that `rank` holds, in the order of its own list."""
        holds_set = np.array([rank in ranks for ranks in self.holders], dtype=bool)
        return np.flatnonzero(holds_set[self.holder])

    def with_dims(self, dims: int) -> Holdings:
        """Pads every box to `dims` dimensions with `[0, 1)`."""
        missing = ((0, 0), (0, dims - self.start.shape[1]))
        return replace(self, start=np.pad(self.start, missing), stop=np.pad(self.stop, missing, constant_values=1))

    def of_adapters(self, adapters: Sequence[str]) -> Holdings:
        """Repeats the rows, of one adapter, for each of `adapters`, under its names in a sync."""
        count, rows = len(adapters), len(self.tensor)
        start, stop = (np.tile(corner, (count, 1)) for corner in (self.start, self.stop))
        return replace(
            self,
            names=tuple(wire_name(adapter, name) for adapter in adapters for name in self.names),
            tensor=np.tile(self.tensor, count) + np.arange(count).repeat(rows) * len(self.names),
            start=start,
            stop=stop,
            dtype=np.tile(self.dtype, count),
            holder=np.tile(self.holder, count),
        )

    @property
    def itemsize(self) -> Ints:
        """Bytes of an element of each row, `[n]`. Raises ValueError for a dtype that torch lacks."""
        return np.array([dtype_of(name).itemsize for name in self.dtypes], dtype=np.int64)[self.dtype]

    @property
    def nbytes(self) -> Ints:
        """Bytes of each row, `[n]`. Raises ValueError for a dtype that torch lacks."""
        return np.prod(self.stop - self.start, axis=1) * self.itemsize


@dataclass(frozen=True, eq=False)
class Topology:
    """Nodes and servers of all ranks: `source_node [trainer ranks]`; `node`, `server [destination ranks]`.

    Destination ranks count over all servers: rank 0 of the second server of TP 8 is 8. Nodes are any integers.
    """

    source_node: Ints
    node: Ints
    server: Ints

    @staticmethod
    def of_sizes(sources: int, server_sizes: Sequence[int], ranks_per_node: int, first: int | None = None) -> Topology:
        """Lays ranks out in order, `ranks_per_node` each: trainers, then servers from place `first` on.

        Without `first` servers have nodes of their own; 0 puts both sides onto the same devices.
        """
        if first is None:
            first = -(-sources // ranks_per_node) * ranks_per_node
        return Topology(
            source_node=np.arange(sources) // ranks_per_node,
            node=(first + np.arange(sum(server_sizes))) // ranks_per_node,
            server=np.repeat(np.arange(len(server_sizes)), server_sizes),
        )


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`, such as "bfloat16". Raises ValueError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype
