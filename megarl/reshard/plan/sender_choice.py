"""Fills buckets, picks who sends each to whom, and puts the messages into one order for all ranks."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from megarl.reshard.plan.box_arrays import sum_by
from megarl.reshard.plan.holdings import Holdings, Ints, Topology
from megarl.reshard.plan.transfer_plan import Buckets, Messages

SLACK_BUCKETS = 4  # a destination keeps to its sender while loads stay within so many buckets of each other

Sets = tuple[tuple[int, ...], ...]


def fill(holder: Ints, replicas: Ints, nbytes: Ints, replica_sets: Sets, most: int) -> tuple[Ints, Ints, Ints]:
    """Puts ops with the same destinations and the same candidates for a sender into buckets of at most `most` bytes.

    A last, partial bucket rides in an earlier one if all candidates of that one could send it too: norms, which many
    ranks have, travel with the matrices of some. Returns each op's bucket, and each bucket's holder and candidates.
    """
    sets = [frozenset(ranks) for ranks in replica_sets]
    freedom = np.array([len(ranks) for ranks in replica_sets], dtype=np.int64)
    order = np.lexsort((np.arange(len(holder)), replicas, freedom[replicas], holder))
    changes = (np.diff(holder[order]) != 0) | (np.diff(replicas[order]) != 0)
    bucket = np.empty(len(holder), dtype=np.int64)
    holders: list[int] = []
    candidates: list[int] = []
    room: dict[int, int] = {}  # free bytes of the partial buckets of the present holder
    for begin, end in pairwise([0, *(np.flatnonzero(changes) + 1), len(order)]):
        here, wanted = int(holder[order[begin]]), int(replicas[order[begin]])
        if not holders or holders[-1] != here:
            room = {}
        total = np.cumsum(nbytes[order[begin:end]])
        at = base = 0
        while at < end - begin:
            to = int(np.searchsorted(total, base + most, side="right"))
            filled = int(total[to - 1]) - base
            number = len(holders)
            if to == end - begin:
                may_ride = (b for b, free in room.items() if filled <= free and sets[candidates[b]] <= sets[wanted])
                number = next(may_ride, number)
                room[number] = room.get(number, most) - filled
            bucket[order[begin + at : begin + to]] = number
            if number == len(holders):
                holders.append(here)
                candidates.append(wanted)
            at, base = to, base + filled
    return bucket, np.array(holders, dtype=np.int64), np.array(candidates, dtype=np.int64)


def choose(buckets: Buckets, destinations: Holdings, replica_sets: Sets, topology: Topology, slack: int) -> Messages:
    """Picks a sender for every destination of every bucket; `slack` in bytes.

    Buckets with the fewest candidates go first, so that those with a choice even the loads out.
    """
    loads = np.zeros(len(topology.source_node), dtype=np.int64)
    groups: dict[tuple[int, int], list[tuple[Ints, Ints]]] = {}
    latest: dict[tuple[int, int, int], Ints] = {}
    chosen: list[tuple[int, Ints, Ints]] = []
    freedom = np.array([len(replica_sets[r]) for r in buckets.replicas], dtype=np.int64)
    for bucket in np.lexsort((np.arange(len(freedom)), freedom)):
        key = int(buckets.replicas[bucket]), int(buckets.holder[bucket])
        if key not in groups:
            groups[key] = _by_node(replica_sets[key[0]], destinations.holders[key[1]], topology)
        size = int(buckets.nbytes[bucket])
        for number, (candidates, receivers) in enumerate(groups[key]):
            senders = latest.get((*key, number))
            if senders is None or not _stay_even(loads, senders, candidates, size, slack):
                senders = latest[(*key, number)] = _least_loaded(loads, candidates, len(receivers), size)
            np.add.at(loads, senders, size)
            chosen.append((int(bucket), senders, receivers))
    return _in_order(chosen, len(topology.node))


def _by_node(replicas: tuple[int, ...], receivers: tuple[int, ...], topology: Topology) -> list[tuple[Ints, Ints]]:
    """(candidates, receivers) of each node that has both, then those of all receivers without a neighbour."""
    sources, wanting = np.array(replicas, dtype=np.int64), np.array(receivers, dtype=np.int64)
    groups = []
    lonely = np.ones(len(wanting), dtype=bool)
    for node in np.intersect1d(topology.source_node[sources], topology.node[wanting]):
        here = topology.node[wanting] == node
        lonely &= ~here
        groups.append((sources[topology.source_node[sources] == node], wanting[here]))
    if lonely.any():
        groups.append((sources, wanting[lonely]))
    return groups


def _stay_even(loads: Ints, senders: Ints, candidates: Ints, size: int, slack: int) -> bool:
    """Whether no sender is more than `slack` above any candidate once `senders` send `size` bytes more each."""
    times = np.bincount(np.searchsorted(candidates, senders), minlength=len(candidates))
    after = loads[candidates] + times * size
    return bool(after[times > 0].max() - after.min() <= slack)


def _least_loaded(loads: Ints, candidates: Ints, count: int, size: int) -> Ints:
    """Picks the least loaded candidate `count` times, each pick adding `size` to its load; ties go to the lowest."""
    heap = [(int(loads[rank]), int(rank)) for rank in candidates]
    heapq.heapify(heap)
    picked = []
    for _ in range(count):
        load, rank = heap[0]
        picked.append(rank)
        heapq.heapreplace(heap, (load + size, rank))
    return np.array(picked, dtype=np.int64)


def _in_order(chosen: list[tuple[int, Ints, Ints]], destinations: int) -> Messages:
    """Round by round: in each, every destination gets one bucket.

    Each destination begins at another point of its list, so that no round asks all of them to hear one sender.
    """
    bucket = np.concatenate([np.full(len(receivers), number) for number, _, receivers in chosen])
    source = np.concatenate([senders for _, senders, _ in chosen])
    destination = np.concatenate([receivers for _, _, receivers in chosen])
    by_destination = np.lexsort((bucket, destination))
    bucket, source, destination = bucket[by_destination], source[by_destination], destination[by_destination]
    counts = sum_by(destination, np.ones_like(destination), destinations)
    place = np.arange(len(destination)) - (np.cumsum(counts) - counts)[destination]
    turn = (place + destination * counts[destination] // destinations) % counts[destination]
    order = np.lexsort((destination, turn))
    return Messages(bucket[order], source[order], destination[order])
