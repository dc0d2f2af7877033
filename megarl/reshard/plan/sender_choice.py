"""Fills buckets, picks the sender of each, and puts the messages into one order for all ranks."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import islice, pairwise

import numpy as np

from megarl.reshard.plan.holdings import Holdings, Ints, Topology
from megarl.reshard.plan.relay import Forest, RelayRounds, ServedShares, forest
from megarl.reshard.plan.transfer_plan import NO_RELAY, Buckets, Messages

LOOKAHEAD = 16  # peers among which a rank looks for a free one
SLACK_BUCKETS = 4  # a destination keeps its sender while loads stay within this many buckets of each other

ReplicaSets = tuple[tuple[int, ...], ...]


def fill(
    holder: Ints, replicas: Ints, nbytes: Ints, replica_sets: ReplicaSets, max_bytes: int
) -> tuple[Ints, Ints, Ints]:
    """Puts ops with equal destinations and equal candidate senders into buckets of at most `max_bytes`.

    A last, partial bucket joins an earlier one if all candidates of the earlier one could send it too. Norms, held by
    many ranks, thus travel with matrices held by few. Returns each op's bucket, each bucket's holder and candidates.
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
        group_holder, group_replicas = int(holder[order[begin]]), int(replicas[order[begin]])
        if not holders or holders[-1] != group_holder:
            room = {}
        total = np.cumsum(nbytes[order[begin:end]])
        at = base = 0
        while at < end - begin:
            to = int(np.searchsorted(total, base + max_bytes, side="right"))
            filled = int(total[to - 1]) - base
            number = len(holders)
            if to == end - begin:
                with_room = (
                    b for b, free in room.items() if filled <= free and sets[candidates[b]] <= sets[group_replicas]
                )
                number = next(with_room, number)
                room[number] = room.get(number, max_bytes) - filled
            bucket[order[begin + at : begin + to]] = number
            if number == len(holders):
                holders.append(group_holder)
                candidates.append(group_replicas)
            at, base = to, base + filled
    return bucket, np.array(holders, dtype=np.int64), np.array(candidates, dtype=np.int64)


def choose(
    buckets: Buckets,
    destinations: Holdings,
    replica_sets: ReplicaSets,
    topology: Topology,
    slack: int,
    served: ServedShares,
) -> Messages:
    """Picks a sender for every destination of every bucket; `slack` in bytes.

    Buckets with the fewest candidates go first, so that buckets with a choice even the loads out. The trainer serves
    only the share `served` of the destinations, and these forward to the rest.
    """
    loads = np.zeros(len(topology.source_node), dtype=np.int64)
    groups: dict[tuple[int, int], list[tuple[Ints, Ints, bool]]] = {}
    latest: dict[tuple[int, ...], Ints] = {}
    chosen: list[tuple[int, Ints, Forest]] = []
    leaves = RelayRounds.of(buckets, destinations) if served != ServedShares() else None
    forests: dict[tuple[bytes, int, int], Forest] = {}
    freedom = np.array([len(replica_sets[r]) for r in buckets.replicas], dtype=np.int64)
    for bucket in np.lexsort((np.arange(len(freedom)), freedom)):
        key = int(buckets.replicas[bucket]), int(buckets.holder[bucket])
        if key not in groups:
            groups[key] = _by_node(replica_sets[key[0]], destinations.holders[key[1]], topology)
        size = int(buckets.nbytes[bucket])
        stripe = leaves.stripe(bucket) if leaves is not None else 0
        for number, (candidates, receivers, near) in enumerate(groups[key]):
            roots = served.roots(len(receivers), near)
            shape = receivers.tobytes(), roots, stripe
            if shape not in forests:
                forests[shape] = forest(receivers, roots, stripe)
            senders = latest.get((*key, number, stripe))
            if senders is None or not _stay_even(loads, senders, candidates, size, slack):
                senders = latest[(*key, number, stripe)] = _least_loaded(loads, candidates, roots, size)
            np.add.at(loads, senders, size)
            chosen.append((int(bucket), senders, forests[shape]))
    bucket = np.concatenate([np.full(len(trees.ranks), number) for number, _, trees in chosen])
    source = np.concatenate([senders[trees.tree] for _, senders, trees in chosen])
    destination = np.concatenate([trees.ranks for _, _, trees in chosen])
    relay = np.concatenate([trees.relay for _, _, trees in chosen])
    if leaves is None or (relay == NO_RELAY).all():
        order = in_turn(bucket, source, destination, buckets.nbytes[bucket])
    else:
        level = np.concatenate([trees.level for _, _, trees in chosen])
        first = np.concatenate([trees.first for _, _, trees in chosen])
        order = np.lexsort((destination, level, leaves.rounds(bucket, first, level, len(topology.node))))
    return Messages(bucket[order], source[order], destination[order], relay[order])


def _by_node(
    replicas: tuple[int, ...], receivers: tuple[int, ...], topology: Topology
) -> list[tuple[Ints, Ints, bool]]:
    """Groups of (candidates, receivers, on one node): one group for each node with both, then the other receivers."""
    sources, receiving = np.array(replicas, dtype=np.int64), np.array(receivers, dtype=np.int64)
    groups = []
    remote = np.ones(len(receiving), dtype=bool)
    for node in np.intersect1d(topology.source_node[sources], topology.node[receiving]):
        on_node = topology.node[receiving] == node
        remote &= ~on_node
        groups.append((sources[topology.source_node[sources] == node], receiving[on_node], True))
    if remote.any():
        groups.append((sources, receiving[remote], False))
    return groups


def _stay_even(loads: Ints, senders: Ints, candidates: Ints, size: int, slack: int) -> bool:
    """True if `senders` may send `size` bytes more each and stay within `slack` of every candidate's load."""
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


def in_turn(bucket: Ints, source: Ints, destination: Ints, nbytes: Ints) -> Ints:
    """Orders messages so that ranks wait little for each other, if each sends one and receives one at a time.

    The side with the busiest rank chooses. The first free rank of that side takes its next bucket, with a peer that is
    free by then or else the first to be free. Ranks take turns among their peers, and begin with different ones. A list
    schedule of this kind takes at most twice the time of the busiest rank (Graham 1966). For large models it takes 1 to
    2% more than that time.
    """
    peer, chooser = source, destination
    if np.bincount(source, nbytes).max() > np.bincount(destination, nbytes).max():
        peer, chooser = chooser, peer
    by_pair = np.lexsort((bucket, peer, chooser))
    peers, choosers, sizes = (values[by_pair].tolist() for values in (peer, chooser, nbytes))
    ranks = int(chooser.max()) + 1
    queues: list[deque[tuple[int, int, int]]] = [deque() for _ in range(ranks)]  # a peer, and its messages [first, end)
    pairs = np.flatnonzero((np.diff(peer[by_pair]) != 0) | (np.diff(chooser[by_pair]) != 0)) + 1
    for first, end in pairwise([0, *pairs.tolist(), len(by_pair)]):
        queues[choosers[first]].append((peers[first], first, end))
    for rank, queue in enumerate(queues):
        queue.rotate(-(rank * len(queue) // ranks))
    free = [0] * (int(peer.max()) + 1)  # the time, in bytes sent, at which each peer is free
    ready = [(0, rank) for rank, queue in enumerate(queues) if queue]
    order = []
    while ready:
        now, rank = heapq.heappop(ready)
        queue, place, least = queues[rank], 0, None
        for number, (other, _, _) in enumerate(islice(queue, LOOKAHEAD)):
            if least is None or free[other] < least:
                place, least = number, free[other]
                if least <= now:
                    break
        queue.rotate(-place)
        other, first, end = queue.popleft()
        if first + 1 < end:
            queue.append((other, first + 1, end))
        order.append(first)
        free[other] = max(now, free[other]) + sizes[first]
        if queue:
            heapq.heappush(ready, (free[other], rank))
    return by_pair[order]
