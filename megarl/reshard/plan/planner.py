"""Plans a transfer, a pure function of both sides' holdings: the tensor parts that each rank sends to each other rank.

A destination rank needs exactly the boxes it holds, each element once, from any trainer rank that holds it. Every plan
is checked for this; the checks cost little next to planning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from megarl.reshard.plan.box_arrays import BoxArray, distinct_rows, overlaps, split, sum_by, union_volume
from megarl.reshard.plan.holdings import Holdings, Ints, Topology
from megarl.reshard.plan.relay import OFF, ServedShares
from megarl.reshard.plan.sender_choice import SLACK_BUCKETS, ReplicaSets, choose, fill
from megarl.reshard.plan.transfer_plan import NO_RELAY, Buckets, Ops, TransferPlan, bytes_held

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
    *,
    relay: str = OFF,
) -> TransferPlan:
    """Plans the transfer of all that `destinations` hold, from `sources`.

    A box is sent by one of the ranks that hold it. Ranks on the destination's node come first, then the one with the
    fewest bytes to send so far, then the lowest. A destination keeps its sender while the loads stay within a few
    buckets of each other, so that it has few peers.

    No bucket exceeds `bucket_bytes`. Bytes are counted in the destinations' dtypes: senders cast. `waived` names
    trainer tensors that no server needs. With `relay="auto"` servers send on what they have received, as far
    as the trainer cannot serve them at the speed at which they receive. With a number it serves only so many itself.

    Raises:
        PlanError: a destination holds elements that no source has; a server lacks a trainer tensor that is not waived;
            boxes of the sources overlap without being equal.
        ValueError: a bucket cannot hold one element; there is nothing to plan.
    """
    if not len(destinations.tensor):
        raise ValueError("no server holds any tensor: there is nothing to plan")
    dims = max(sources.start.shape[1], destinations.start.shape[1])
    sources, destinations = sources.with_dims(dims), destinations.with_dims(dims)
    itemsize = destinations.itemsize
    if bucket_bytes < itemsize.max():
        raise ValueError(f"bucket_bytes={bucket_bytes} is less than an element of {itemsize.max()} bytes; raise it")
    needed = BoxArray(_common_names(sources, destinations), destinations.start, destinations.stop)
    blocks, block_of_row = BoxArray(sources.tensor, sources.start, sources.stop).distinct()
    replica_sets, replicas = _replicas(block_of_row, sources, len(blocks))

    _check_disjoint(sources, blocks)
    block, row, start, stop = overlaps(blocks, needed)
    _check_covered(sources, needed, sum_by(row, np.prod(stop - start, axis=1), len(needed)))
    unused = _check_used(sources, blocks, destinations, needed, topology, frozenset(waived))

    part, start, stop = split(start, stop, itemsize[row], max(bucket_bytes // OPS_A_BUCKET, 1))
    block, row = block[part], row[part]
    nbytes = np.prod(stop - start, axis=1) * itemsize[row]
    bucket, holder, candidates = fill(destinations.holder[row], replicas[block], nbytes, replica_sets, bucket_bytes)
    order = np.lexsort((np.arange(len(row)), -itemsize[row], bucket))  # the widest dtype first keeps offsets aligned
    first = np.searchsorted(bucket[order], np.arange(len(holder) + 1))
    before = np.concatenate([[0], np.cumsum(nbytes[order])])
    offset = before[:-1] - before[first[bucket[order]]]
    needed_bytes = bytes_held(destinations, len(topology.node))
    served = ServedShares.of(relay, needed_bytes, len(topology.source_node), len(np.unique(topology.server)))
    unhashed = TransferPlan(
        sources=sources,
        destinations=destinations,
        topology=topology,
        bucket_bytes=bucket_bytes,
        block_of_row=block_of_row,
        replica_sets=replica_sets,
        ops=Ops(block[order], row[order], start[order], stop[order], offset),
        buckets=(buckets := Buckets(first, before[first[1:]] - before[first[:-1]], holder, candidates)),
        messages=choose(buckets, destinations, replica_sets, topology, SLACK_BUCKETS * bucket_bytes, served),
        waived=unused,
        hash="",
    )
    _check_bytes(unhashed)
    _check_relays(unhashed)
    return replace(unhashed, hash=_hash(unhashed))


def _common_names(sources: Holdings, destinations: Holdings) -> Ints:
    """The destinations' tensors as indices into the sources' names, `[destination rows]`."""
    known = {name: i for i, name in enumerate(sources.names)}
    for name in destinations.names:
        if name not in known:
            raise PlanError(f"{name} is held by the servers and by no trainer rank: is it the same model?", name)
    return np.array([known[name] for name in destinations.names], dtype=np.int64)[destinations.tensor]


def _replicas(block_of_row: Ints, sources: Holdings, blocks: int) -> tuple[ReplicaSets, Ints]:
    """The sets of ranks that hold the same block, and each block's set."""
    pairs = np.column_stack([block_of_row, sources.holder])
    pairs = pairs[distinct_rows(pairs)[0]]
    first = np.searchsorted(pairs[:, 0], np.arange(blocks + 1))
    counts = np.diff(first)
    sets: dict[tuple[int, ...], int] = {}
    replicas = np.empty(blocks, dtype=np.int64)
    for count in np.unique(counts):  # blocks with equally many holder sets form a matrix
        alike = np.flatnonzero(counts == count)
        held_by = pairs[:, 1][first[alike][:, None] + np.arange(count)]
        heads, index = distinct_rows(held_by)
        ranks = [tuple(sorted({r for h in held_by[i] for r in sources.holders[h]})) for i in heads]
        replicas[alike] = np.array([sets.setdefault(r, len(sets)) for r in ranks], dtype=np.int64)[index]
    return tuple(sets), replicas


def _check_disjoint(sources: Holdings, blocks: BoxArray) -> None:
    """Raises PlanError where two different blocks share elements."""
    left, right, _, _ = overlaps(blocks, blocks)
    if len(crossing := np.flatnonzero(left != right)):
        a, b = left[crossing[0]], right[crossing[0]]
        name = sources.names[blocks.tensor[a]]
        both = f"{blocks.text(a)} and {blocks.text(b)}"
        raise PlanError(f"{name}: the trainer's parts {both} overlap without being equal", name)


def _check_covered(sources: Holdings, needed: BoxArray, covered: Ints) -> None:
    """Raises PlanError unless each element that a destination holds comes from a source.

    It comes from one source only, as the sources' boxes are disjoint.
    """
    volume = needed.volume
    if len(short := np.flatnonzero(covered != volume)):
        i = short[0]
        name = sources.names[needed.tensor[i]]
        raise PlanError(
            f"{name}: a server holds {needed.text(i)}, {volume[i]} elements, of which the trainer ranks hold "
            f"{covered[i]}: is it the same model?",
            name,
        )


def _check_used(
    sources: Holdings,
    blocks: BoxArray,
    destinations: Holdings,
    needed: BoxArray,
    topology: Topology,
    waived: frozenset[str],
) -> tuple[str, ...]:
    """Returns the waived tensors that some server does not take in full.

    Raises PlanError unless every server takes each element of each other source tensor.
    """
    held = sum_by(blocks.tensor, blocks.volume, len(sources.names))
    holders_of: dict[int, set[int]] = {int(server): set() for server in topology.server}
    for holder, ranks in enumerate(destinations.holders):
        for server in np.unique(topology.server[list(ranks)]):
            holders_of[int(server)].add(holder)
    unused = set()
    kinds = {frozenset(holders): server for server, holders in reversed(holders_of.items())}  # alike servers once
    for holders, server in kinds.items():
        boxes, _ = needed[np.flatnonzero(np.isin(destinations.holder, list(holders)))].distinct()
        used = sum_by(boxes.tensor, boxes.volume, len(sources.names))
        left, right, _, _ = overlaps(boxes, boxes)
        for tensor in np.unique(boxes.tensor[left[left != right]]):  # overlaps were counted twice above
            used[tensor] = union_volume(boxes[np.flatnonzero(boxes.tensor == tensor)])
        for tensor in np.flatnonzero(used != held):
            name = sources.names[tensor]
            if name not in waived:
                raise PlanError(
                    f"{name}: server {server} takes {used[tensor]} of the trainer's {held[tensor]} elements; "
                    "waive it by name if servers do not need it",
                    name,
                )
            unused.add(name)
    return tuple(sorted(unused))


def _check_bytes(unhashed: TransferPlan) -> None:
    """Raises AssertionError unless every destination receives as many bytes as its fragments have."""
    short = np.flatnonzero(unhashed.bytes_in != unhashed.bytes_needed)
    if len(short):
        rank = short[0]
        raise AssertionError(
            f"destination {rank} would receive {unhashed.bytes_in[rank]} bytes of {unhashed.bytes_needed[rank]}"
        )


def _check_relays(unhashed: TransferPlan) -> None:
    """Raises AssertionError unless every relay has received a bucket, from the same source, before it sends it on."""
    messages, ranks = unhashed.messages, len(unhashed.topology.node)
    (sent_on,) = np.nonzero(messages.relay != NO_RELAY)
    if len(sent_on) == 0:
        return
    received = messages.bucket * ranks + messages.destination  # unique, as each destination gets a bucket once
    order = np.argsort(received)
    wanted = messages.bucket[sent_on] * ranks + messages.relay[sent_on]
    place = np.minimum(np.searchsorted(received, wanted, sorter=order), len(order) - 1)
    before = order[place]
    wrong = (received[before] != wanted) | (before >= sent_on) | (messages.source[before] != messages.source[sent_on])
    if wrong.any():
        index = sent_on[np.flatnonzero(wrong)[0]]
        raise AssertionError(
            f"destination {messages.relay[index]} would forward bucket {messages.bucket[index]} unseen"
        )


def _hash(unhashed: TransferPlan) -> str:
    """SHA-256 (hex) of both sides' holdings, the ops, the buckets and the messages."""
    digest = hashlib.sha256()
    for side in (unhashed.sources, unhashed.destinations):
        digest.update("\0".join((*side.names, *side.dtypes)).encode())
        digest.update(repr(side.holders).encode())
        for array in (side.tensor, side.start, side.stop, side.dtype, side.holder):
            digest.update(array.astype(np.int64).tobytes())
    for part in (unhashed.ops, unhashed.buckets, unhashed.messages):
        for array in vars(part).values():
            digest.update(array.astype(np.int64).tobytes())
    return digest.hexdigest()
