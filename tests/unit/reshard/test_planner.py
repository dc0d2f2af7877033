"""Plans between random worlds: every element once, everything used, exact bytes, equal to the full path."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import check_delivery, checkpoint_of

from megarl.reshard.plan.holdings import Box, Holdings, Topology, dtype_of
from megarl.reshard.plan.planner import PlanError, plan
from megarl.reshard.plan.sender_choice import in_turn
from megarl.reshard.plan.transfer_plan import TransferPlan

Parts = list[tuple[Box, str]]


@dataclass
class World:
    """A checkpoint and the boxes of it that the ranks of both sides hold."""

    shapes: dict[str, tuple[int, ...]]
    sources: list[Parts]
    destinations: list[Parts]
    server_sizes: list[int]
    bucket_bytes: int
    ranks_per_node: int
    first: int | None

    def topology(self) -> Topology:
        return Topology.of_sizes(len(self.sources), self.server_sizes, self.ranks_per_node, self.first)

    def plan(self, waived: tuple[str, ...] = ()) -> TransferPlan:
        return plan(
            Holdings.of(self.sources), Holdings.of(self.destinations), self.topology(), self.bucket_bytes, waived
        )


def cut(draw: st.DrawFn, size: int, max_parts: int) -> list[int]:
    """Edges that cut `[0, size)` into one to `max_parts` uneven parts."""
    inner = draw(st.lists(st.integers(1, size - 1), max_size=max_parts - 1, unique=True)) if size > 1 else []
    return [0, *sorted(inner), size]


def tiles(draw: st.DrawFn, name: str, shape: tuple[int, ...], max_parts: int) -> list[Box]:
    """Boxes that cover a tensor, each element once."""
    corners: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        edges = cut(draw, size, max_parts)
        spans = list(pairwise(edges))
        corners = [((*a, s), (*b, t)) for a, b in corners for s, t in spans]
    return [Box(name, a, b) for a, b in corners]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    dims = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
    shapes = {f"t{i}": shape for i, shape in enumerate(draw(st.lists(dims, min_size=1, max_size=5)))}
    ranks = draw(st.integers(1, 6))
    sources: list[Parts] = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        for box in tiles(draw, name, shape, 3):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                sources[rank].append((box, "float64"))
    destinations: list[Parts] = []
    server_sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    for size in server_sizes:
        held: list[Parts] = [[] for _ in range(size)]
        dtype = draw(st.sampled_from(["float32", "bfloat16", "float64"]))
        for name, shape in shapes.items():
            wide = draw(st.booleans())  # as a router in fp32 next to weights in bf16
            for box in tiles(draw, name, shape, 3):
                for rank in draw(st.sets(st.integers(0, size - 1), min_size=1)):
                    held[rank].append((box, "float32" if wide else dtype))
        destinations += held
    return World(
        shapes=shapes,
        sources=sources,
        destinations=destinations,
        server_sizes=server_sizes,
        bucket_bytes=draw(st.sampled_from([8, 60, 500, 4000])),
        ranks_per_node=draw(st.integers(1, 4)),
        first=draw(st.one_of(st.none(), st.integers(0, 6))),
    )


@given(worlds())
@settings(max_examples=40)
def test_a_plan_of_random_worlds_delivers_every_element_once_and_bit_equal_to_the_whole_tensors(world: World) -> None:
    check_world(world)


@pytest.mark.long
@given(worlds())
@settings(max_examples=400)
def test_a_plan_of_many_random_worlds_delivers_every_element_once(world: World) -> None:
    check_world(world)


def check_world(world: World) -> None:
    checkpoint = checkpoint_of(world.shapes)
    transfer_plan = world.plan()
    check_delivery(transfer_plan, checkpoint)
    needed = [
        sum(math.prod(box.shape) * dtype_of(dtype).itemsize for box, dtype in rank) for rank in world.destinations
    ]
    assert transfer_plan.bytes_in.tolist() == needed
    assert transfer_plan.bytes_out.sum() == sum(needed)


@given(worlds())
@settings(max_examples=60)
def test_both_ends_go_through_their_messages_in_one_global_order(world: World) -> None:
    transfer_plan = world.plan()
    sent = {}
    for rank in range(len(world.sources)):
        indices = [t.index for t in transfer_plan.sends(rank)]
        assert indices == sorted(indices)
        sent |= {t.index: (rank, t.peer, t.nbytes) for t in transfer_plan.sends(rank)}
    received = {}
    for rank in range(len(world.destinations)):
        indices = [t.index for t in transfer_plan.receives(rank)]
        assert indices == sorted(indices)
        received |= {t.index: (t.peer, rank, t.nbytes) for t in transfer_plan.receives(rank)}
    assert sent == received
    assert sorted(sent) == list(range(len(sent)))


def seconds_in(order: np.ndarray, source: np.ndarray, destination: np.ndarray, nbytes: np.ndarray) -> int:
    """Time until the last message has arrived, in bytes, if ranks take their messages one by one in this order."""
    sends, receives = (dict.fromkeys(ranks.tolist(), 0) for ranks in (source, destination))
    for i in order.tolist():
        end = max(sends[source[i]], receives[destination[i]]) + int(nbytes[i])
        sends[source[i]] = receives[destination[i]] = end
    return max(receives.values())


@pytest.mark.parametrize(("sources", "destinations"), [(64, 32), (48, 48), (16, 128)])
def test_ranks_wait_little_for_each_other(sources: int, destinations: int) -> None:
    """The busiest rank of all takes least, and all end little later."""
    generator = np.random.default_rng(0)
    messages = 100 * destinations
    source = generator.integers(0, sources, messages)
    destination = np.arange(messages) % destinations
    nbytes, bucket = generator.integers(900, 1000, messages), np.arange(messages) // destinations
    order = in_turn(bucket, source, destination, nbytes)
    assert sorted(order.tolist()) == list(range(messages))
    least = max(np.bincount(ranks, nbytes).max() for ranks in (source, destination))
    assert seconds_in(order, source, destination, nbytes) < 1.05 * least
    if sources > 16:  # else any order keeps the senders busy
        assert seconds_in(np.arange(messages), source, destination, nbytes) > 1.4 * least


@given(worlds())
@settings(max_examples=40)
def test_the_hash_depends_on_the_inputs_and_on_nothing_else(world: World) -> None:
    transfer_plan = world.plan()
    assert transfer_plan.hash == world.plan().hash
    assert transfer_plan.hash != replace(world, shapes={}, sources=[*world.sources, world.sources[0]]).plan().hash


@given(worlds())
@settings(max_examples=60)
def test_a_neighbour_on_the_same_node_sends_whenever_there_is_one(world: World) -> None:
    transfer_plan, topology = world.plan(), world.topology()
    for source, destination, bucket in zip(
        transfer_plan.messages.source, transfer_plan.messages.destination, transfer_plan.messages.bucket, strict=True
    ):
        able = transfer_plan.replica_sets[transfer_plan.buckets.replicas[bucket]]
        assert source in able
        on_node = [rank for rank in able if topology.source_node[rank] == topology.node[destination]]
        assert not on_node or source in on_node


def replicated(ranks: int, servers: int, rows: int = 64, bucket_bytes: int = 64) -> World:
    """One matrix held by all trainer ranks, for servers of one rank."""
    box = Box("w", (0, 0), (rows, 8))
    return World(
        {"w": (rows, 8)}, [[(box, "float32")]] * ranks, [[(box, "float32")]] * servers, [1] * servers, bucket_bytes, 1,
        first=None,
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "servers"), [(1, 5), (4, 1), (4, 4), (3, 4), (5, 12)])
def test_replicas_share_the_load_within_a_few_buckets(ranks: int, servers: int) -> None:
    world = replicated(ranks, servers)
    transfer_plan = world.plan()
    assert transfer_plan.bytes_out.max() - transfer_plan.bytes_out.min() <= 5 * world.bucket_bytes


def test_a_destination_keeps_to_one_sender_where_the_load_allows_it() -> None:
    transfer_plan = replicated(ranks=4, servers=8).plan()
    for rank in range(8):
        assert len({t.peer for t in transfer_plan.receives(rank)}) == 1


def test_small_tensors_that_all_ranks_hold_ride_with_the_matrices_of_some() -> None:
    norm, halves = (
        (Box("n", (0,), (8,)), "float32"),
        [(Box("w", (4 * i, 0), (4 * i + 4, 8)), "float32") for i in (0, 1)],
    )
    everything = [(Box("w", (0, 0), (8, 8)), "float32"), norm]
    world = World({}, [[halves[0], norm], [halves[1], norm]], [everything], [1], 10_000, 1, first=None)
    assert sorted(t.nbytes for t in world.plan().receives(0)) == [128, 160]


def test_a_box_larger_than_a_bucket_is_cut_and_no_bucket_exceeds_its_bound() -> None:
    box = Box("w", (0, 0), (3, 100))
    world = World({"w": (3, 100)}, [[(box, "float32")]], [[(box, "float32")]], [1], 120, 1, first=None)
    sizes = [t.nbytes for t in world.plan().receives(0)]
    assert sum(sizes) == 1200
    assert max(sizes) <= 120


def test_a_bucket_that_cannot_hold_an_element_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=3 is less than an element of 4 bytes"):
        replicated(1, 1, bucket_bytes=3).plan()


def test_what_no_trainer_rank_holds_is_refused_by_name() -> None:
    world = replicated(1, 1)
    other = [[*world.destinations[0], (Box("v", (0,), (2,)), "float32")]]
    with pytest.raises(PlanError, match="v is held by the servers and by no trainer rank") as raised:
        replace(world, destinations=other).plan()
    assert raised.value.tensor == "v"


def test_a_part_that_no_trainer_rank_holds_is_refused_with_both_counts() -> None:
    world = replicated(1, 1)
    with pytest.raises(PlanError, match=r"w: a server holds \[0:65, 0:8\], 520 elements, .* hold 512"):
        replace(world, destinations=[[(Box("w", (0, 0), (65, 8)), "float32")]]).plan()


def test_a_server_that_lacks_a_tensor_is_refused_unless_it_is_waived_by_name() -> None:
    world = replicated(2, 2)
    more = replace(world, sources=[[*world.sources[0], (Box("v", (0,), (2,)), "float32")]] * 2)
    with pytest.raises(PlanError, match="v: server 0 takes 0 of the trainer's 2 elements; waive it by name"):
        more.plan()
    assert more.plan(waived=("v", "unknown")).waived == ("v",)


def test_one_server_of_many_that_lacks_a_part_is_refused() -> None:
    world = replicated(1, 3)
    lacking = [*world.destinations[:2], [(Box("w", (0, 0), (63, 8)), "float32")]]
    with pytest.raises(PlanError, match="w: server 2 takes 504 of the trainer's 512 elements"):
        replace(world, destinations=lacking).plan()


def test_ranks_of_one_server_that_overlap_count_once() -> None:
    boxes = [Box("w", (0, 0), (40, 8)), Box("w", (30, 0), (64, 8))]
    world = replace(replicated(1, 1), destinations=[[(b, "float32")] for b in boxes], server_sizes=[2])
    assert world.plan().bytes_in.tolist() == [40 * 32, 34 * 32]
    gap = [Box("w", (0, 0), (30, 8)), Box("w", (0, 0), (30, 4)), Box("w", (31, 0), (64, 8))]
    with pytest.raises(PlanError, match="server 0 takes 504 of"):
        replace(world, destinations=[[(b, "float32")] for b in gap], server_sizes=[3]).plan()


def test_parts_of_the_trainer_that_overlap_without_being_equal_are_refused() -> None:
    parts = [[(Box("w", (0, 0), (40, 8)), "float32")], [(Box("w", (30, 0), (64, 8)), "float32")]]
    with pytest.raises(PlanError, match=r"w: .*\[30:64, 0:8\] and \[0:40, 0:8\] overlap without being equal"):
        replace(replicated(2, 1), sources=parts).plan()


def test_nothing_to_send_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to plan"):
        replace(replicated(1, 1), destinations=[[]]).plan()
