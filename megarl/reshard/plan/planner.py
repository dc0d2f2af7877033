"""Which rank sends which part of which tensor to whom: a pure function of what both sides hold.

A destination rank needs exactly the boxes it holds, each element once, from any one of the trainer ranks that hold it.
The proofs of that run with every plan; they cost little beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from megarl.reshard.plan.box_arrays import Boxes, distinct_rows, overlaps, split, sum_by, union_volume
from megarl.reshard.plan.holdings import Holdings, Ints, Topology, itemsize
from megarl.reshard.plan.sender_choice import SLACK_BUCKETS, Sets, choose, fill
from megarl.reshard.plan.transfer_plan import Buckets, Ops, TransferPlan

OPS_A_BUCKET = 8  # larger copies are cut, so that buckets come out at least 7/8 full


class PlanError(ValueError):
    """The two sides do not fit together. `tensor` names the first checkpoint tensor at fault."""

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


def plan(
    sources: Holdings,
    destinations: Holdings,
    topology: Topology,
    bucket_bytes: int,
    waived: Collection[str] = (),
) -> TransferPlan:
    """Plans the transfer of everything that `destinations` hold from `sources`.

    A sender is picked among the ranks that hold a box: those on the destination's node if there are any, of them the
    one with the fewest bytes to send so far, of equals the lowest. A destination keeps to its sender while that leaves
    the loads within a few buckets of each other, so that it has few peers. No bucket exceeds `bucket_bytes`. Bytes are
    counted in the destinations' dtypes: senders cast.

    Raises:
        PlanError: a destination holds what no source does; a server lacks a tensor that the sources have and that is
            not `waived` by name; boxes of the sources overlap without being equal.
        ValueError: a bucket cannot hold one element; there is nothing to plan.
    """
    if not len(destinations.tensor):
        raise ValueError("no server holds any tensor: there is nothing to plan")
    dims = max(sources.start.shape[1], destinations.start.shape[1])
    sources, destinations = sources.with_dims(dims), destinations.with_dims(dims)
    sizes = np.array([itemsize(name) for name in destinations.dtypes], dtype=np.int64)[destinations.dtype]
    if bucket_bytes < sizes.max():
        raise ValueError(f"bucket_bytes={bucket_bytes} is less than an element of {sizes.max()} bytes; raise it")
    wanted = Boxes(_common_names(sources, destinations), destinations.start, destinations.stop)
    blocks, block_of_row = Boxes(sources.tensor, sources.start, sources.stop).distinct()
    replica_sets, replicas = _replicas(block_of_row, sources, len(blocks))

    _check_disjoint(sources, blocks)
    block, row, start, stop = overlaps(blocks, wanted)
    _check_covered(sources, wanted, sum_by(row, np.prod(stop - start, axis=1), len(wanted)))
    left = _check_used(sources, blocks, destinations, wanted, topology, frozenset(waived))

    part, start, stop = split(start, stop, sizes[row], max(bucket_bytes // OPS_A_BUCKET, 1))
    block, row = block[part], row[part]
    nbytes = np.prod(stop - start, axis=1) * sizes[row]
    bucket, holder, candidates = fill(destinations.holder[row], replicas[block], nbytes, replica_sets, bucket_bytes)
    order = np.lexsort((np.arange(len(row)), -sizes[row], bucket))  # the widest dtype first keeps offsets aligned
    first = np.searchsorted(bucket[order], np.arange(len(holder) + 1))
    before = np.concatenate([[0], np.cumsum(nbytes[order])])
    offset = before[:-1] - before[first[bucket[order]]]
    made = TransferPlan(
        sources=sources,
        destinations=destinations,
        topology=topology,
        bucket_bytes=bucket_bytes,
        block_of_row=block_of_row,
        replica_sets=replica_sets,
        ops=Ops(block[order], row[order], start[order], stop[order], offset),
        buckets=(buckets := Buckets(first, before[first[1:]] - before[first[:-1]], holder, candidates)),
        messages=choose(buckets, destinations, replica_sets, topology, SLACK_BUCKETS * bucket_bytes),
        waived=left,
        hash="",
    )
    _check_bytes(made)
    return replace(made, hash=_hash(made))


def _common_names(sources: Holdings, destinations: Holdings) -> Ints:
    """The destinations' tensors as indices into the sources' names, `[destination rows]`."""
    known = {name: i for i, name in enumerate(sources.names)}
    for name in destinations.names:
        if name not in known:
            raise PlanError(f"{name} is held by the servers and by no trainer rank: is it the same model?", name)
    return np.array([known[name] for name in destinations.names], dtype=np.int64)[destinations.tensor]


def _replicas(block_of_row: Ints, sources: Holdings, blocks: int) -> tuple[Sets, Ints]:
    """The sets of ranks that hold the same block, and each block's set."""
    pairs = np.column_stack([block_of_row, sources.holder])
    pairs = pairs[distinct_rows(pairs)[0]]
    first = np.searchsorted(pairs[:, 0], np.arange(blocks + 1))
    counts = np.diff(first)
    sets: dict[tuple[int, ...], int] = {}
    replicas = np.empty(blocks, dtype=np.int64)
    for count in np.unique(counts):  # blocks that stand in equally many holder sets form a matrix
        alike = np.flatnonzero(counts == count)
        held_by = pairs[:, 1][first[alike][:, None] + np.arange(count)]
        heads, index = distinct_rows(held_by)
        ranks = [tuple(sorted({r for h in held_by[i] for r in sources.holders[h]})) for i in heads]
        replicas[alike] = np.array([sets.setdefault(r, len(sets)) for r in ranks], dtype=np.int64)[index]
    return tuple(sets), replicas


def _check_disjoint(sources: Holdings, blocks: Boxes) -> None:
    one, other, _, _ = overlaps(blocks, blocks)
    if len(crossing := np.flatnonzero(one != other)):
        a, b = one[crossing[0]], other[crossing[0]]
        name = sources.names[blocks.tensor[a]]
        both = f"{blocks.text(a)} and {blocks.text(b)}"
        raise PlanError(f"{name}: the trainer's parts {both} overlap without being equal", name)


def _check_covered(sources: Holdings, wanted: Boxes, covered: Ints) -> None:
    """Every element that a destination holds comes from some source; once, as the sources' boxes are disjoint."""
    volume = wanted.volume
    if len(short := np.flatnonzero(covered != volume)):
        i = short[0]
        name = sources.names[wanted.tensor[i]]
        raise PlanError(
            f"{name}: a server holds {wanted.text(i)}, {volume[i]} elements, of which the trainer ranks hold "
            f"{covered[i]}: is it the same model?",
            name,
        )


def _check_used(
    sources: Holdings,
    blocks: Boxes,
    destinations: Holdings,
    wanted: Boxes,
    topology: Topology,
    waived: frozenset[str],
) -> tuple[str, ...]:
    """Every server takes every element of every source tensor that is not waived. Returns the waived that are left."""
    held = sum_by(blocks.tensor, blocks.volume, len(sources.names))
    holders_of: dict[int, set[int]] = {int(server): set() for server in topology.server}
    for holder, ranks in enumerate(destinations.holders):
        for server in np.unique(topology.server[list(ranks)]):
            holders_of[int(server)].add(holder)
    left = set()
    kinds = {frozenset(holders): server for server, holders in reversed(holders_of.items())}  # alike servers once
    for holders, server in kinds.items():
        boxes, _ = wanted[np.flatnonzero(np.isin(destinations.holder, list(holders)))].distinct()
        used = sum_by(boxes.tensor, boxes.volume, len(sources.names))
        one, other, _, _ = overlaps(boxes, boxes)
        for tensor in np.unique(boxes.tensor[one[one != other]]):  # counted twice above
            used[tensor] = union_volume(boxes[np.flatnonzero(boxes.tensor == tensor)])
        for tensor in np.flatnonzero(used != held):
            name = sources.names[tensor]
            if name not in waived:
                raise PlanError(
                    f"{name}: server {server} takes {used[tensor]} of the trainer's {held[tensor]} elements; "
                    "waive it by name if servers do not need it",
                    name,
                )
            left.add(name)
    return tuple(sorted(left))


def _check_bytes(made: TransferPlan) -> None:
    """Every destination receives as many bytes as its fragments have."""
    short = np.flatnonzero(made.bytes_in != made.bytes_needed)
    if len(short):
        rank = short[0]
        raise AssertionError(
            f"destination {rank} would receive {made.bytes_in[rank]} bytes of {made.bytes_needed[rank]}"
        )


def _hash(made: TransferPlan) -> str:
    digest = hashlib.sha256()
    for side in (made.sources, made.destinations):
        digest.update("\0".join((*side.names, *side.dtypes)).encode())
        digest.update(repr(side.holders).encode())
        for array in (side.tensor, side.start, side.stop, side.dtype, side.holder):
            digest.update(array.astype(np.int64).tobytes())
    for part in (made.ops, made.buckets, made.messages):
        for array in vars(part).values():
            digest.update(array.astype(np.int64).tobytes())
    return digest.hexdigest()
