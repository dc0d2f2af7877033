"""Plans in which servers send on what they have received: exact, balanced, bounded in fan-out, and free of deadlock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from in_memory import check_delivery, checkpoint_of
from test_planner import World, worlds

from megarl.reshard.plan.holdings import Box, Holdings, Topology
from megarl.reshard.plan.planner import _check_relays, plan
from megarl.reshard.plan.relay import FAN_OUT, STRIPES, RelayRounds, forest, pairs_in_turn, served_share
from megarl.reshard.plan.transfer_plan import NO_RELAY, TransferPlan
from megarl.reshard.transfer.digests import relays_at_fault

ROWS = 96


def of_alike_servers(sources: int, servers: int, tp: int, relay: str = "auto", per_node: int = 8) -> TransferPlan:
    """A trainer that cuts two tensors by row, each part on one rank, and alike servers that cut them by column."""
    shapes = {f"t{i}": (ROWS, 8 * tp) for i in range(2)}
    part = ROWS // sources
    trainer = [
        [(Box(n, (r * part, 0), ((r + 1) * part, s[1])), "float32") for n, s in shapes.items()] for r in range(sources)
    ]
    server = [[(Box(n, (0, 8 * r), (ROWS, 8 * r + 8)), "float32") for n in shapes] for r in range(tp)]
    topology = Topology.of_sizes(sources, [tp] * servers, per_node)
    return plan(Holdings.of(trainer), Holdings.of(server * servers), topology, 256, relay=relay)


@settings(max_examples=25)
@given(worlds())
def test_random_worlds_are_delivered_once_and_bit_equal_through_relays(world: World) -> None:
    with_relays = plan(
        Holdings.of(world.sources), Holdings.of(world.destinations), world.topology(), world.bucket_bytes, relay="auto"
    )
    check_delivery(with_relays, checkpoint_of(world.shapes))
    assert (with_relays.bytes_in == with_relays.bytes_needed).all()
    assert with_relays.bytes_in.sum() == with_relays.bytes_out.sum() + with_relays.bytes_forwarded.sum()


@pytest.mark.parametrize(("sources", "servers", "tp"), [(1, 2, 1), (2, 16, 1), (2, 40, 2), (8, 33, 2)])
def test_hundreds_of_servers_cost_the_trainer_no_more_than_one_server_receives(
    sources: int, servers: int, tp: int
) -> None:
    relayed, direct = (of_alike_servers(sources, servers, tp, relay) for relay in ("auto", "off"))
    check_delivery(relayed, checkpoint_of({f"t{i}": (ROWS, 8 * tp) for i in range(2)}))
    assert (relayed.bytes_in == direct.bytes_in).all()
    assert (direct.messages.relay == NO_RELAY).all()
    receives = relayed.bytes_in.max()
    assert direct.bytes_out.max() * sources >= receives * servers * tp
    assert relayed.bytes_out.max() <= 1.3 * receives  # a root more or less, where buckets are few
    assert relayed.bytes_forwarded.max() <= 1.3 * receives
    assert relayed.hash != direct.hash


def test_a_relay_serves_few_others_and_knows_few_peers() -> None:
    messages = of_alike_servers(2, 40, 2).messages
    sent_on = messages.relay != NO_RELAY
    children = Counter(zip(messages.relay[sent_on].tolist(), messages.bucket[sent_on].tolist(), strict=True))
    assert max(children.values()) == FAN_OUT
    pairs = np.unique(np.stack([messages.relay[sent_on], messages.destination[sent_on]]), axis=1)
    assert np.bincount(pairs[0]).max() <= FAN_OUT * STRIPES
    assert np.bincount(pairs[1]).max() <= STRIPES


def test_every_message_waits_only_for_earlier_ones() -> None:
    """Each rank works through its sends and its receives by rising index; a relay sends a bucket once it has it.

    Run one message at a time, in any order that the ranks allow, this never stops before the end.
    """
    messages = of_alike_servers(2, 12, 2).messages
    sender = np.where(messages.relay == NO_RELAY, -1 - messages.source, messages.relay)
    done = np.zeros(len(sender), dtype=bool)
    has: set[tuple[int, int]] = set()
    while not done.all():
        ready = [
            i
            for i in np.flatnonzero(~done)
            if done[:i][sender[:i] == sender[i]].all()
            and done[:i][messages.destination[:i] == messages.destination[i]].all()
            and (sender[i] < 0 or (int(sender[i]), int(messages.bucket[i])) in has)
        ]
        assert ready, "ranks wait for each other"
        done[ready[-1]] = True  # the least favourable: the last of the order
        has.add((int(messages.destination[ready[-1]]), int(messages.bucket[ready[-1]])))


def test_servers_beside_the_trainer_are_served_by_it_and_relay_nothing() -> None:
    topology = Topology(source_node=np.zeros(1, dtype=np.int64), node=np.arange(8) // 2, server=np.arange(8))
    everything = [(Box("a", (0,), (512,)), "float32")]
    near = plan(Holdings.of([everything]), Holdings.of([everything] * 8), topology, 256, relay="auto").messages
    beside = near.destination < 2
    assert (near.relay[beside] == NO_RELAY).all()
    assert not np.isin(near.relay, (0, 1)).any()
    assert (near.relay[~beside] != NO_RELAY).any()


def test_few_servers_need_no_relays() -> None:
    assert (of_alike_servers(8, 4, 2).messages.relay == NO_RELAY).all()
    assert of_alike_servers(8, 4, 2).hash == of_alike_servers(8, 4, 2, relay="off").hash
    assert served_share(np.array([10, 10]), 2) == 1.0
    assert served_share(np.full(100, 10), 25) == 0.25


def test_trees_are_bounded_in_fan_out_and_each_stripe_has_other_roots() -> None:
    receivers = np.arange(100, 120)
    roots = []
    for stripe in range(STRIPES):
        trees = forest(receivers, 2, stripe)
        assert sorted(trees.ranks) == receivers.tolist()
        assert trees.tree.tolist() == [0] * 10 + [1] * 10
        assert trees.first.tolist() == [100] * 10 + [110] * 10
        assert trees.level.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3] * 2
        relayed = trees.relay != NO_RELAY
        assert np.unique(trees.relay[relayed], return_counts=True)[1].max() == FAN_OUT
        roots += trees.ranks[~relayed].tolist()
    assert len(set(roots)) == 2 * STRIPES


def test_neighbouring_buckets_leave_in_distant_rounds_and_take_turns_among_stripes() -> None:
    relayed = of_alike_servers(2, 40, 2)
    turns = RelayRounds.of(relayed.buckets, relayed.destinations)
    for rank in range(2):
        holders = [holder for holder, ranks in enumerate(relayed.destinations.holders) if rank in ranks]
        own = np.flatnonzero(np.isin(relayed.buckets.holder, holders))
        assert sorted(turns.turn[own]) == list(range(len(own)))
        assert np.abs(np.diff(turns.turn[own])).min() > len(own) / 4
        by_turn = own[np.argsort(turns.turn[own])]
        assert [turns.stripe(bucket) for bucket in by_turn[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("fault", ["late", "never", "itself", "other source"])
def test_a_relay_without_the_bucket_is_an_error_of_the_plan(fault: str) -> None:
    good = of_alike_servers(2, 16, 1)
    _check_relays(good)
    messages = good.messages
    index = int(np.flatnonzero(messages.relay != NO_RELAY)[0])
    relay, source = messages.relay.copy(), messages.source.copy()
    if fault == "never":
        relay[index] = 99
    elif fault == "itself":
        relay[index] = messages.destination[index]
    elif fault == "late":
        last = np.flatnonzero(messages.bucket == messages.bucket[index])[-1]
        relay[index] = messages.destination[last]
    else:
        source[index] = 1 - source[index]
    with pytest.raises(AssertionError, match="would forward bucket"):
        _check_relays(replace(good, messages=replace(messages, relay=relay, source=source)))


def test_a_number_of_servers_is_all_that_the_trainer_serves_on_any_machine() -> None:
    everything = [(Box("a", (0,), (512,)), "float32")]
    alone = Topology(source_node=np.zeros(1, dtype=np.int64), node=np.zeros(12, dtype=np.int64), server=np.arange(12))
    for topology, roots in ((Topology.of_sizes(1, [1] * 12, 1), 3), (alone, 3), (alone, 20)):
        messages = plan(Holdings.of([everything]), Holdings.of([everything] * 12), topology, 256, relay=str(roots))
        direct = messages.messages.relay == NO_RELAY
        assert np.bincount(messages.messages.bucket[direct]).tolist() == [min(roots, 12)] * len(messages.buckets.nbytes)


def test_pairs_connect_in_an_order_in_which_no_rank_waits_for_more_than_its_own_pairs() -> None:
    """A rank connects its pairs one by one. Pairs of one turn are disjoint, so all ends in as many turns."""
    messages = of_alike_servers(2, 40, 2).messages
    sent_on = messages.relay != NO_RELAY
    expected = set(zip(messages.relay[sent_on].tolist(), messages.destination[sent_on].tolist(), strict=True))
    pairs = pairs_in_turn(messages)
    assert len(pairs) == len(expected)
    assert set(pairs) == expected
    turns: dict[int, int] = {}
    for pair in pairs:
        turn = max(turns.get(rank, 0) for rank in pair) + 1
        turns.update(dict.fromkeys(pair, turn))
    most = max(Counter(rank for pair in pairs for rank in pair).values())
    assert max(turns.values()) < 2 * most


def test_the_rank_where_bits_went_astray_is_the_last_that_has_them_right() -> None:
    planned = of_alike_servers(1, 12, 1)
    messages = planned.messages
    deep = next(i for i in np.flatnonzero(messages.relay != NO_RELAY)[::-1])
    bucket = messages.bucket[deep]
    way = [int(deep)]
    while (relay := int(messages.relay[way[0]])) != NO_RELAY:
        way.insert(0, int(np.flatnonzero((messages.bucket == bucket) & (messages.destination == relay))[0]))
    ranks = messages.destination[way].tolist()
    assert len(ranks) >= 3
    assert relays_at_fault(planned, []) == set()
    assert relays_at_fault(planned, way[:1]) == set()  # from the trainer: no relay has to do with it
    assert relays_at_fault(planned, way[-1:]) == {ranks[-2]}
    assert relays_at_fault(planned, way[1:]) == {ranks[0]}
    assert relays_at_fault(planned, way) == {ranks[0]}  # it was given wrong ones, and sent those on
