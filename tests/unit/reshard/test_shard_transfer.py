"""Plans carried out over real gloo and shared memory: random layouts on both sides, bit for bit, and failures."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from megarl.actor.weights.computed_boxes import ComputedBox, View
from megarl.reshard.plan.holdings import Box, Fragment, Holdings, Topology
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.transfer_plan import Messages, TransferPlan
from megarl.reshard.transfer.digests import BucketSample, VerificationError, check_messages
from megarl.reshard.transfer.shard_transfer import Route, ShardReceiver, ShardSender, TransferError
from megarl.reshard.transfer.store import Deadline, join_store, open_store
from megarl.reshard.transfer.transports import shm, transport_named
from megarl.reshard.transfer.transports.base import Transport
from megarl.reshard.transfer.transports.shm import FOLDER, PREFIX, ShmTransport

HOST = "127.0.0.1"
ALL = BucketSample(1)


def split(name: str, tensor: Tensor, ways: int, dim: int, rank: int) -> tuple[Box, Tensor]:
    """Box and strided view of part `rank` of `ways` of a tensor along `dim`."""
    size = tensor.shape[dim] // ways
    start = tuple(rank * size if d == dim else 0 for d in range(tensor.dim()))
    stop = tuple((rank + 1) * size if d == dim else n for d, n in enumerate(tensor.shape))
    return Box(name, start, stop), tensor.narrow(dim, rank * size, size)


@dataclass
class World:
    """Trainer ranks and one server's ranks with random layouts of the same tensors."""

    tensors: dict[str, Tensor]
    sources: list[list[Fragment]]
    destinations: list[list[Fragment]]
    plan: TransferPlan


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of NaN, strided like a part of a larger parameter."""
    dims = list(range(len(shape)))[::-1]
    return torch.full([shape[d] for d in dims], torch.nan, dtype=dtype).permute(dims)


def holdings_of(ranks: list[list[Fragment]]) -> Holdings:
    return Holdings.of([[(f.box, str(f.view.dtype).removeprefix("torch.")) for f in rank] for rank in ranks])


def source_of(name: str, view: Tensor) -> View:
    """The view, or of each third tensor values that are made when they are read."""
    if int(name[1:]) % 3:
        return view
    return ComputedBox(tuple(view.shape), view.dtype, view.data_ptr(), lambda: view)


def make_world(seed: int, sources: int, destinations: int, dtype: torch.dtype, bucket_bytes: int = 512) -> World:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors = {f"t{i}": torch.randn(*(rng.choice((12, 24)) for _ in range(rng.choice((1, 2, 2))))) for i in range(9)}
    held: dict[str, list[list[Fragment]]] = {"source": [], "destination": []}
    for side, ranks in (("source", sources), ("destination", destinations)):
        ways = {name: (rng.choice((1, ranks)), rng.randrange(tensors[name].dim())) for name in tensors}
        for rank in range(ranks):
            fragments = []
            for name, (count, dim) in ways.items():
                box, view = split(name, tensors[name], count, dim, rank % count)
                live = source_of(name, view) if side == "source" else strided(view.shape, dtype)
                fragments.append(Fragment(rank, name, box, live))
            held[side].append(fragments)
    zeros = np.zeros(destinations, dtype=np.int64)
    topology = Topology(source_node=np.zeros(sources, dtype=np.int64), node=zeros, server=zeros)
    transfer_plan = plan(holdings_of(held["source"]), holdings_of(held["destination"]), topology, bucket_bytes)
    return World(tensors, held["source"], held["destination"], transfer_plan)


class Group:
    """The joined ranks of a world: senders and receivers."""

    def __init__(self, world: World, kind: str, keep: bool = False):
        transport_class: type[Transport] = transport_named(kind)
        self.store: TCPStore = open_store(HOST, 300)
        sources, destinations = len(world.sources), len(world.destinations)
        size = sources + destinations

        def join(rank: int) -> Transport:
            make = transport_class.make_staging if rank < sources else transport_class.make_receiver_staging
            store = PrefixStore("group", join_store(HOST, self.store.port, 300))
            return transport_class(store, HOST, rank, size, 300, make(512))

        with ThreadPoolExecutor(size) as pool:
            self.ends: list[Any] = list(pool.map(join, range(size)))
        self.senders = [
            ShardSender(
                world.plan,
                rank,
                fragments,
                {n: Route(f"rank {n} of server 0", self.ends[rank], sources + n) for n in range(destinations)},
                self.ends[rank].staging,
                keep=keep,
            )
            for rank, fragments in enumerate(world.sources)
        ]
        self.receivers = [
            ShardReceiver(
                world.plan,
                rank,
                fragments,
                {n: Route(f"trainer rank {n}", self.ends[sources + rank], n) for n in range(sources)},
                self.ends[sources + rank].staging,
            )
            for rank, fragments in enumerate(world.destinations)
        ]

    def run(self, counts: list[dict[int, list[int]]] | None = None) -> tuple[list[Any], list[Any]]:
        """Runs one sync. Returns the results of the senders and of the receivers."""
        by_sender = counts or [{} for _ in self.senders]
        by_bucket = {bucket: changed for sender in by_sender for bucket, changed in sender.items()}
        with ThreadPoolExecutor(len(self.ends)) as pool:
            sent = [pool.submit(s.send, Deadline(120), ALL, c) for s, c in zip(self.senders, by_sender, strict=True)]
            received = [pool.submit(r.receive, Deadline(120), by_bucket) for r in self.receivers]
            return [f.result() for f in sent], [f.result().nbytes for f in received]

    def close(self) -> None:
        for end in self.ends:
            end.abort()
            end.staging.close()


@pytest.fixture
def grouped() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(*arguments: Any, **knobs: Any) -> Group:
        groups.append(Group(*arguments, **knobs))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def damage_one_message(end: Any) -> None:
    """Flips a bit of the next message that a receiver gets."""
    receive = end.receive

    def once(slot: int, nbytes: int, peer: int, tag: int) -> Any:
        end.receive, pending = receive, receive(slot, nbytes, peer, tag)
        wait = pending.wait

        def flipped(deadline: Deadline) -> Tensor:
            payload = wait(deadline)
            payload[nbytes // 2] ^= 1
            return payload

        pending.wait = flipped
        return pending

    end.receive = once


def send_new_weights(world: World, group: Group) -> tuple[list[Any], list[Any]]:
    """Gives the tensors random values and syncs them. Returns the results of the senders and of the receivers."""
    for tensor in world.tensors.values():
        tensor.copy_(torch.randn_like(tensor))
    sent, received = group.run()
    assert_delivered(world)
    return sent, received


def assert_delivered(world: World) -> None:
    """Asserts that every destination equals the full tensors, cast to its dtype."""
    for fragments in world.destinations:
        for fragment in fragments:
            assert fragment.view.equal(fragment.box.of(world.tensors[fragment.box.name]).to(fragment.view.dtype))


@pytest.mark.parametrize("kind", ["gloo", "shm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seed", "sources", "destinations"), [(1, 1, 2), (2, 4, 2), (3, 2, 4), (4, 3, 3)])
def test_random_layouts_arrive_bit_for_bit_and_no_byte_twice(
    seed: int, sources: int, destinations: int, dtype: torch.dtype, kind: str, grouped: Callable[..., Group]
) -> None:
    world = make_world(seed, sources, destinations, dtype)
    group = grouped(world, kind)
    for _ in range(2):  # the same group and plan serve again
        sent, received = send_new_weights(world, group)
        needed = [sum(f.view.numel() * dtype.itemsize for f in fragments) for fragments in world.destinations]
        assert received == needed == world.plan.bytes_in.tolist()
        assert sum(s.nbytes for s in sent) == sum(needed)
        digests = [s.digests for s in sent]
        for rank, receiver in enumerate(group.receivers):
            assert check_messages(world.plan, ALL, digests, rank, receiver.read_back(ALL), "here") >= len(world.tensors)


def test_a_bit_that_differs_is_named_with_its_tensor(grouped: Callable[..., Group]) -> None:
    world = make_world(2, 2, 2, torch.float32)
    group = grouped(world, "gloo")
    sent, _ = group.run()
    victim = world.destinations[1][3]
    victim.view.reshape(-1)[:1] = 0  # reshape may copy: write through the first element instead
    victim.view[(0,) * victim.view.dim()] += 1
    digests = [s.digests for s in sent]
    check_messages(world.plan, ALL, digests, 0, group.receivers[0].read_back(ALL), "rank 0")
    with pytest.raises(VerificationError, match=f"rank 1 does not hold what was sent of {victim.box.name}") as error:
        check_messages(world.plan, ALL, digests, 1, group.receivers[1].read_back(ALL), "rank 1")
    assert error.value.tensor == victim.box.name
    with pytest.raises(VerificationError, match="does not hold"):
        check_messages(world.plan, ALL, digests, 1, {}, "rank 1")


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_byte_damaged_on_the_way_is_noticed(kind: str, grouped: Callable[..., Group]) -> None:
    world = make_world(3, 2, 2, torch.float32)
    group = grouped(world, kind)
    damage_one_message(group.ends[2])
    sent, _ = group.run()
    digests = [s.digests for s in sent]
    with pytest.raises(VerificationError, match="rank 0 does not hold what was sent of t"):
        check_messages(world.plan, ALL, digests, 0, group.receivers[0].read_back(ALL), "rank 0")
    check_messages(world.plan, ALL, digests, 1, group.receivers[1].read_back(ALL), "rank 1")


@pytest.mark.parametrize("kind", ["gloo", "shm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deltas_bring_what_changed_into_strided_parameters(
    dtype: torch.dtype, kind: str, grouped: Callable[..., Group]
) -> None:
    world = make_world(5, 2, 4, dtype)
    group = grouped(world, kind, keep=True)
    assert [sender.counts() for sender in group.senders] == [{}, {}]  # nothing was sent before: everything is due
    dense = sum(s.nbytes for s in group.run()[0])
    assert_delivered(world)
    for changes in (0, 1, 3):
        for tensor in world.tensors.values():
            for _ in range(changes):
                tensor.view(-1)[random.Random(changes).randrange(tensor.numel())] += 1.0
        sent, received = group.run([sender.counts() for sender in group.senders])
        assert_delivered(world)
        assert sum(received) == sum(s.nbytes for s in sent)
        assert sum(s.dense_nbytes for s in sent) == dense
        assert (sum(received) == 0) == (changes == 0)
        assert sum(received) < dense / 2
    for tensor in world.tensors.values():
        tensor.copy_(torch.randn_like(tensor))
    sent, _ = group.run([sender.counts() for sender in group.senders])
    assert_delivered(world)
    assert sum(s.nbytes for s in sent) == dense  # a delta of everything is larger


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_bucket_that_is_packed_again_for_a_later_receiver_is_the_same_delta(
    kind: str, grouped: Callable[..., Group]
) -> None:
    """Two servers alike, in another order of the messages: all buckets for one rank, then all for the next."""
    world = make_world(5, 1, 2, torch.float32)
    world.destinations += [
        [Fragment(f.rank + 2, f.tensor, f.box, strided(f.box.shape, torch.float32)) for f in rank]
        for rank in world.destinations
    ]
    zeros = np.zeros(4, dtype=np.int64)
    topology = Topology(source_node=zeros[:1], node=zeros, server=np.array([0, 0, 1, 1]))
    transfer_plan = plan(holdings_of(world.sources), holdings_of(world.destinations), topology, 512)
    messages = transfer_plan.messages
    order = np.lexsort((messages.bucket, messages.destination))
    reordered = Messages(*(column[order] for column in vars(messages).values()))
    world.plan = replace(transfer_plan, messages=reordered)
    group = grouped(world, kind, keep=True)
    again = [{b for b in sender.buckets if sender.buckets.count(b) > 1} for sender in group.senders if sender.buckets]
    assert any(again)
    group.run()
    assert_delivered(world)
    for change in (1.0, 2.0):
        for tensor in world.tensors.values():
            tensor.view(-1)[:: max(tensor.numel() // 3, 1)] += change
        counts = [sender.counts() for sender in group.senders]
        assert any(set(of_sender) & packed for of_sender, packed in zip(counts, again, strict=True))
        group.run(counts)
        assert_delivered(world)


def test_without_deltas_no_copy_of_the_buckets_is_kept(grouped: Callable[..., Group]) -> None:
    world = make_world(5, 2, 4, torch.float32)
    group = grouped(world, "gloo", keep=False)
    group.run()
    assert [sender.counts() for sender in group.senders] == [{}, {}]


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_receiver_that_leaves_is_named_with_the_tensor(kind: str, grouped: Callable[..., Group]) -> None:
    world = make_world(1, 1, 2, torch.float32)
    group = grouped(world, kind)
    group.ends[1].abort()
    start = time.monotonic()
    with pytest.raises(TransferError, match="rank 0 of server 0 left") as error:
        group.senders[0].send(Deadline(600), ALL, {})
    assert error.value.peer == "rank 0 of server 0"
    assert error.value.tensor in world.tensors
    assert time.monotonic() - start < 300


def test_a_receiver_that_is_silent_ends_the_sender_by_its_deadline(grouped: Callable[..., Group]) -> None:
    world = make_world(1, 1, 1, torch.float32)
    group = grouped(world, "gloo")
    with pytest.raises(TransferError, match=r"waited for rank 0 of server 0: deadline of 0\.5 s passed"):
        group.senders[0].send(Deadline(0.5), ALL, {})


def test_a_sender_that_is_silent_ends_the_receiver_by_its_deadline(grouped: Callable[..., Group]) -> None:
    world = make_world(1, 1, 1, torch.float32)
    group = grouped(world, "gloo")
    thread = threading.Thread(target=time.sleep, args=(0.1,))
    thread.start()
    with pytest.raises(TransferError, match=r"waited for trainer rank 0: deadline of 0\.5 s passed"):
        group.receivers[0].receive(Deadline(0.5), {})
    thread.join()


def test_a_deadline_that_has_passed_is_raised_with_its_length() -> None:
    deadline = Deadline(0.01)
    time.sleep(0.02)
    with pytest.raises(TimeoutError, match=r"deadline of 0\.01 s passed"):
        deadline.left()
    assert 0 < Deadline(60).left() <= 60


def test_shared_staging_is_this_users_alone_and_is_removed() -> None:
    staging = ShmTransport.make_staging(4096)
    path = staging.path
    assert path.parent == FOLDER
    assert path.name.startswith(PREFIX)
    assert path.stat().st_size == 2 * 4096
    assert path.stat().st_mode & 0o777 == 0o600
    staging.close()
    assert not path.exists()


def test_staging_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own: other tests' processes remove the staging of killed ones too."""
    monkeypatch.setattr(shm, "FOLDER", tmp_path)
    program = (
        "import pathlib, sys, time\n"
        "from megarl.reshard.transfer.transports import shm\n"
        "shm.FOLDER = pathlib.Path(sys.argv[1])\n"
        "print(shm.SharedStaging(4096).path, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        staging = ShmTransport.make_staging(4096)
        stayed = path.exists()
        owner.kill()
        owner.wait(timeout=600)
    assert stayed
    assert path.exists()
    ShmTransport.make_staging(4096).close()
    assert not path.exists()
    assert staging.path.exists()
    staging.close()


@pytest.mark.parametrize("name", ["../etc/passwd", "megarl-/../x", "other", ""])
def test_only_staging_files_are_mapped(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a staging file"):
        ShmTransport.map(ShmTransport.__new__(ShmTransport), [name, 16])
    with pytest.raises(FileNotFoundError):
        ShmTransport.map(ShmTransport.__new__(ShmTransport), ["megarl-none", 16])


def test_a_shared_memory_that_is_full_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"lower reshard\.bucket_bytes"):
        ShmTransport.make_staging(1 << 52)


def test_samples_take_every_bucket_in_turn() -> None:
    taken = [[BucketSample.of("sampled", sequence).takes(bucket) for bucket in range(20)] for sequence in range(8)]
    assert np.sum(taken, axis=0).tolist() == [1] * 20
    assert [BucketSample.of("always", 3).takes(bucket) for bucket in range(4)] == [True] * 4
    assert [BucketSample.of("off", 3).takes(bucket) for bucket in range(4)] == [False] * 4
