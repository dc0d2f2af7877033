"""Relays: servers that have received a bucket send it on, so that a trainer feeds hundreds of them.

The trainer ranks serve as many servers as they can while the servers receive at full speed. The others get each bucket
from a server that has it. The destinations of a bucket form trees: the trainer serves the root, and a rank forwards to
at most FAN_OUT others. The tree of the next bucket has another root. So a rank that forwards in one tree is a leaf in
the next, and sends on no more than it receives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

import numpy as np

from megarl.reshard.plan.holdings import Holdings, Ints
from megarl.reshard.plan.transfer_plan import NO_RELAY, Buckets, Messages

OFF, AUTO = "off", "auto"
FAN_OUT = 2
STRIPES = 2 * FAN_OUT  # trees over the same ranks; more trees would only add peers
LAG = 4  # rounds from a rank to those that it forwards to: it takes turns with up to STRIPES others
GOLDEN = (5**0.5 - 1) / 2


def served_share(bytes_needed: Ints, sources: int) -> float:
    """The share of the destinations that the trainer serves itself, at most 1.

    Its ranks then send as many bytes, on average, as the busiest destination receives.
    """
    return min(1.0, sources * int(bytes_needed.max()) / int(bytes_needed.sum()))


@dataclass(frozen=True)
class ServedShares:
    """Shares of the destinations that the trainer serves itself: on its own nodes, and on `other` nodes."""

    near: float = 1.0
    other: float = 1.0

    @staticmethod
    def of(relay: str, bytes_needed: Ints, sources: int, servers: int) -> ServedShares:
        """Reads `relay`: OFF, AUTO (relays to other nodes only), or the number of servers that the trainer serves."""
        if relay == OFF:
            return ServedShares()
        if relay == AUTO:
            return ServedShares(other=served_share(bytes_needed, sources))
        share = min(1.0, int(relay) / servers)
        return ServedShares(share, share)

    def roots(self, receivers: int, near: bool) -> int:
        """Destinations out of `receivers` that the trainer serves itself, at least one."""
        return max(1, int(receivers * (self.near if near else self.other) + 1e-9))


def pairs_in_turn(messages: Messages) -> list[tuple[int, int]]:
    """Every (relay, destination) that exchange messages, in an order in which ranks can connect one pair at a time.

    Pairs are coloured so that no rank has a colour twice. Ranks that follow the order wait for few others.
    """
    sent_on = np.stack([messages.relay, messages.destination])[:, messages.relay != NO_RELAY]
    colours: dict[int, set[int]] = {}
    coloured: list[tuple[int, int, int]] = []
    for relay, destination in np.unique(sent_on, axis=1).T.tolist():
        taken = colours.setdefault(relay, set()), colours.setdefault(destination, set())
        colour = next(colour for colour in count() if not any(colour in of_rank for of_rank in taken))
        for of_rank in taken:
            of_rank.add(colour)
        coloured.append((colour, relay, destination))
    return [(relay, destination) for _, relay, destination in sorted(coloured)]


@dataclass(frozen=True, eq=False)
class Forest:
    """One bucket's way to its destinations, each `[receivers]`.

    `ranks`: the destinations; `relay`: the rank that forwards to each, NO_RELAY for roots; `tree`: number of its tree;
    `level`: 0 for roots; `first`: the lowest rank of the tree.
    """

    ranks: Ints
    relay: Ints
    tree: Ints
    level: Ints
    first: Ints


def forest(receivers: Ints, roots: int, stripe: int) -> Forest:
    """A tree over each of `roots` runs of neighbouring receivers. Each stripe has another member of a run as the root.

    A server is in the same trees, with the same peers, for all buckets of a set of destinations.
    """
    trees = [_tree(members, number, stripe) for number, members in enumerate(np.array_split(receivers, roots))]
    return Forest(*(np.concatenate([vars(tree)[column] for tree in trees]) for column in vars(trees[0])))


def _tree(members: Ints, number: int, stripe: int) -> Forest:
    size = len(members)
    ranks = np.roll(members, -(stripe * size // STRIPES))
    parent = np.maximum(np.arange(size) - 1, 0) // FAN_OUT
    level = np.zeros(size, dtype=np.int64)
    first = 1
    while first < size:  # each turn sets the level of the children of ranks before `first`
        last = min(1 + FAN_OUT * first, size)
        level[first:last] = level[parent[first:last]] + 1
        first = last
    relay = np.where(level == 0, NO_RELAY, ranks[parent])
    return Forest(ranks, relay, np.full(size, number), level, np.full(size, members.min()))


@dataclass(frozen=True, eq=False)
class RelayRounds:
    """Rounds in which buckets leave the trainer, each `[buckets]`: one bucket a round for each destination.

    `turn`: the round; `count`: rounds in which a destination's buckets leave. Neighbours in a destination's list are
    held by the same trainer ranks; a golden-ratio step parts them.
    """

    turn: Ints
    count: Ints

    @staticmethod
    def of(buckets: Buckets, destinations: Holdings) -> RelayRounds:
        turn, count = np.zeros_like(buckets.holder), np.ones_like(buckets.holder)
        for holder, ranks in enumerate(destinations.holders):  # ranks of a set have equal lists, or nearly
            sets = [other for other, of in enumerate(destinations.holders) if ranks[0] in of]
            listed = np.flatnonzero(np.isin(buckets.holder, sets))
            own = buckets.holder[listed] == holder
            turn[listed[own]] = (np.arange(len(listed)) * _step(len(listed)) % max(len(listed), 1))[own]
            count[listed] = len(listed)
        return RelayRounds(turn, count)

    def stripe(self, bucket: int) -> int:
        """Stripe of a bucket: successive rounds take successive stripes, so that relays take turns."""
        return int(self.turn[bucket]) % STRIPES

    def rounds(self, bucket: Ints, first: Ints, level: Ints, destinations: int) -> Ints:
        """The round of each message. Trees begin at different points of the list, and ask different trainer ranks."""
        count = self.count[bucket]
        shift = first * count // destinations // STRIPES * STRIPES
        return (self.turn[bucket] + shift) % count + LAG * level


def _step(count: int) -> int:
    """Step size, near the golden ratio, that visits each of `count` places once."""
    step = max(1, round(count * GOLDEN))
    while math.gcd(step, count) > 1:
        step += 1
    return step
