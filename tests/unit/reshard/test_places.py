"""Transports are chosen by the ranks' machines and GPUs; those ruled out are refused, with both ranks named."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from megarl.knobs import UserError
from megarl.reshard.config import ReshardConfig
from megarl.reshard.plan.holdings import Box, Fragment
from megarl.reshard.plan.planner import PlanError
from megarl.reshard.plan.transfer_plan import NO_RELAY, Messages
from megarl.reshard.session import WeightSession
from megarl.reshard.sync import shard_path
from megarl.reshard.sync.attempt import AttemptSpec, ServerGroup
from megarl.reshard.sync.coordinator import Coordinator, Retry
from megarl.reshard.sync.places import TransportChoice, check_places, check_visible, choose_relay, choose_transports
from megarl.reshard.sync.world import publish_fragments
from megarl.reshard.transfer.store import Deadline, read, read_bulk, write, write_bulk
from megarl.reshard.transfer.transports import transport_named


def place(gpu: str = "", node: str = "a", visible: tuple[str, ...] = ()) -> dict[str, Any]:
    seen = list(visible or ((gpu,) if gpu else ()))
    return {"holdings": "", "adapters": [], "node": node, "gpu": gpu, "visible_gpus": seen}


def world(sources: list[dict[str, Any]], *servers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"sources": sources, "servers": list(servers), "bucket_bytes": 16, "adapters_only": False}


def between(*pairs: tuple[int, int]) -> Messages:
    """One message of a plan for each (trainer rank, server rank)."""
    source, destination = np.array(pairs).T
    return Messages(np.zeros(len(pairs), dtype=np.int64), source, destination, np.full(len(pairs), NO_RELAY))


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
def test_memory_of_one_machine_does_not_reach_another(transport: str) -> None:
    apart = world([place("g0")], [place("g1")], [place("g1"), place("g2", node="b")])
    with pytest.raises(PlanError) as error:
        check_places(transport, apart)
    assert str(error.value) == (
        f"reshard.transport={transport} stays on one machine, and trainer rank 0 is on a, rank 1 of server 1 on b; use "
        "gloo, or nccl between GPUs"
    )
    for other in ("gloo", "nccl"):
        check_places(other, apart)


def test_nccl_is_refused_between_a_trainer_and_a_server_on_one_gpu() -> None:
    shared = world([place("GPU-0"), place("GPU-1")], [place("GPU-2")], [place("GPU-1")])
    with pytest.raises(PlanError) as error:
        check_places("nccl", shared)
    assert str(error.value) == (
        "reshard.transport=nccl needs a GPU for each rank, and trainer rank 1 and rank 0 of server 1 share GPU-1; use "
        "cuda_ipc or gloo, or give servers GPUs of their own"
    )
    for other in ("gloo", "shm", "cuda_ipc"):
        check_places(other, shared)


def test_two_servers_on_one_gpu_are_in_no_common_group() -> None:
    check_places("nccl", world([place("GPU-0")], [place("GPU-1")], [place("GPU-1")]))


def test_cuda_ipc_is_refused_if_a_server_does_not_see_the_gpu_that_it_receives_from() -> None:
    hidden = world([place("GPU-0"), place("GPU-1")], [place("GPU-0")], [place("GPU-1")])
    check_visible(between((0, 0), (1, 1)), hidden, {0, 1})
    check_visible(between((0, 0), (1, 1), (0, 1)), hidden, {0})  # server 1 receives by another transport
    with pytest.raises(PlanError) as error:
        check_visible(between((0, 0), (1, 1), (0, 1)), hidden, {0, 1})
    assert str(error.value) == (
        "reshard.transport=cuda_ipc: trainer rank 0 sends from GPU-0, and rank 0 of server 1 sees GPU-1; use nccl or "
        "gloo, or add that GPU to the server's CUDA_VISIBLE_DEVICES"
    )
    hidden["servers"][1][0]["visible_gpus"] = ["GPU-1", "GPU-0"]
    check_visible(between((0, 1)), hidden, {0, 1})


NODE_A = [place(f"A{i}", "a", ("A0", "A1", "A2", "A3")) for i in range(4)]
NODE_B = [place(f"B{i}", "b", ("B0", "B1", "B2", "B3")) for i in range(4)]
CPU = place()


@pytest.mark.parametrize(
    ("sources", "servers", "expected"),
    [
        pytest.param([CPU], [[CPU], [CPU]], "gloo to 2 servers: trainer rank 0 has no GPU", id="CPU"),
        pytest.param(
            NODE_A[:1],
            [NODE_A[:1]],
            "cuda_ipc to 1 server: cuda_ipc on the trainer's machine, which maps GPU memory",
            id="one GPU",
        ),
        pytest.param(
            NODE_A[:2],
            [[NODE_A[2]], [NODE_A[3]]],
            "cuda_ipc to 2 servers: cuda_ipc on the trainer's machine, which maps GPU memory",
            id="one node",
        ),
        pytest.param(
            NODE_A, [NODE_B[:2], NODE_B[2:]], "nccl to 2 servers: nccl between GPUs of their own", id="two nodes"
        ),
        pytest.param(
            NODE_A[:2],
            [[NODE_A[2]], NODE_B[:1]],
            "cuda_ipc to 1 server and nccl to 1 server: cuda_ipc on the trainer's machine, which maps GPU memory; nccl "
            "between GPUs of their own",
            id="servers on both nodes",
        ),
        pytest.param(
            [*NODE_A, NODE_B[0]],
            [NODE_B[1:3], NODE_B[3:]],
            "nccl to 2 servers: nccl between GPUs of their own",
            id="trainer on both nodes",
        ),
        pytest.param(
            [*NODE_A, *NODE_B],
            [NODE_A[:2], [place("C0", "c")]],
            "gloo to 2 servers: trainer rank 0 and rank 0 of server 0 share A0, which nccl refuses, and cuda_ipc does "
            "not reach all ranks",
            id="shared GPUs of two nodes",
        ),
        pytest.param(
            NODE_A[:1],
            [[place("A1", "a", ("A1",))]],
            "nccl to 1 server: nccl between GPUs of their own",
            id="hidden GPU",
        ),
        pytest.param(
            NODE_A[:1],
            [[place("B0", "b", ("B0", "A0"))]],
            "nccl to 1 server: nccl between GPUs of their own",
            id="another node, whatever it sees",
        ),
        pytest.param(
            NODE_A[:2],
            [[NODE_A[2]], [CPU]],
            "gloo to 2 servers: rank 0 of server 1 has no GPU",
            id="a server on the CPU",
        ),
    ],
)
def test_auto_takes_the_fastest_transport_that_the_places_allow(
    sources: list[dict[str, Any]], servers: list[list[dict[str, Any]]], expected: str
) -> None:
    planned = world(sources, *servers)
    choice = choose_transports("auto", planned)
    assert str(choice) == expected
    assert len(choice.names) == len(servers)
    assert len({transport_named(name).memory for name in choice.names}) == 1  # a bucket is packed once
    for name, server in zip(choice.names, servers, strict=True):
        check_places(name, world(sources, server))  # each choice is one that an explicit value may have, too


def test_an_explicit_transport_is_taken_or_refused_but_never_replaced() -> None:
    apart = world(NODE_A[:1], NODE_B[:1])
    for name in ("gloo", "nccl"):
        assert str(choose_transports(name, apart)) == f"{name} to 1 server: reshard.transport={name}"
    for name in ("shm", "cuda_ipc"):
        with pytest.raises(PlanError, match="stays on one machine"):
            choose_transports(name, apart)


def test_servers_join_anew_if_another_server_changes_their_transport() -> None:
    """A server on the CPU is admitted to a session whose servers receive by cuda_ipc."""
    session = WeightSession(ReshardConfig(), ["127.0.0.1:1", "127.0.0.1:2"], "key")
    coordinator = session._coordinator
    assert coordinator is not None
    write(session._store, "source/0", NODE_A[0])
    first, second = coordinator.links
    first.layout, first.transport_name = [NODE_A[1]], "auto"  # as `read_layout` leaves them
    coordinator.active = [first]
    before = session._publish_world(coordinator, "auto", False, Deadline(60.0))
    assert (first.transport_name, session._transports.split()[0]) == ("cuda_ipc", "cuda_ipc")
    assert first.joined("auto")
    assert not first.joined("gloo")
    assert session._publish_world(coordinator, "auto", False, Deadline(60.0)) == before
    second.layout, second.transport_name = [CPU], "auto"
    coordinator.active = [first, second]
    with pytest.raises(Retry):
        session._publish_world(coordinator, "auto", False, Deadline(60.0))
    epochs = [link.epoch for link in coordinator.links]
    assert coordinator.give_up(Retry()) == {"retry": True}
    assert [link.epoch for link in coordinator.links] == [epoch + 1 for epoch in epochs]
    for link, layout in ((first, NODE_A[1]), (second, CPU)):
        assert not link.joined("auto")
        link.layout, link.transport_name = [layout], "auto"
    session._publish_world(coordinator, "auto", False, Deadline(60.0))
    assert [link.server_group.transport_name for link in coordinator.links] == ["gloo", "gloo"]


def test_a_rank_publishes_its_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake torch.cuda: two GPUs, of which the second is current. Covers the numbering, not the driver's UUIDs."""
    fragment = Fragment(0, "a", Box("a", (0,), (2,)), torch.zeros(2))
    without = publish_fragments(HashStore(), [fragment])
    assert (without["gpu"], without["visible_gpus"], without["node"]) == ("", [], socket.gethostname())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{7 - i}"))
    published = publish_fragments(HashStore(), [fragment])
    assert (published["gpu"], published["visible_gpus"]) == ("GPU-6", ["GPU-7", "GPU-6"])


def test_a_session_refuses_the_transport_before_it_publishes_the_world() -> None:
    session = WeightSession(ReshardConfig(transport="nccl"), ["127.0.0.1:1"], "key")
    coordinator = session._coordinator
    assert coordinator is not None
    coordinator.active = list(coordinator.links)
    link = coordinator.active[0]
    link.layout, link.transport_name = [place("GPU-0")], "gloo"
    write(session._store, "source/0", place("GPU-0"))
    assert session._publish_world(coordinator, "gloo", False, Deadline(60.0))
    with pytest.raises(PlanError, match="trainer rank 0 and rank 0 of server 0 share GPU-0"):
        session._publish_world(coordinator, "nccl", False, Deadline(60.0))


def test_adapters_go_alone_to_servers_that_hold_them_and_have_the_base() -> None:
    session = WeightSession(ReshardConfig(), ["127.0.0.1:1"], "key")
    coordinator = session._coordinator
    assert coordinator is not None
    coordinator.active = list(coordinator.links)
    link = coordinator.active[0]
    write(session._store, "source/0", {**CPU, "adapters": ["law", "math"]})
    link.layout, link.transport_name = [{**CPU, "adapters": ["law"]}, {**CPU, "adapters": ["math"]}], "gloo"
    assert [session._publish_world(coordinator, "gloo", clean, Deadline(60.0))[1] for clean in (False, True)] == [
        False,
        True,
    ]
    for held, message in (
        ([], r"server at 127\.0\.0\.1:1 lacks adapters that the trainer sends: law, math; start it by megarl\.serve"),
        (["math"], "lacks adapters that the trainer sends: law;"),
        (["art", "law", "math"], "holds adapters that the trainer does not send: art;"),
    ):
        link.layout = [{**CPU, "adapters": held}]
        with pytest.raises(PlanError, match=message):
            session._publish_world(coordinator, "gloo", False, Deadline(60.0))


def test_cuda_ipc_is_refused_before_the_ranks_are_told_to_begin() -> None:
    """The plan is fixed: one message from trainer rank 0 to the server."""
    store = HashStore()
    write_bulk(store, "world/w", world([place("GPU-0")], [place("GPU-1")]))
    trainer_rank = SimpleNamespace(rank=0, prepare=lambda *_: "hash", plan=SimpleNamespace(messages=between((0, 0))))
    spec = AttemptSpec("exact", 1, 16, "w", False, False, False, 0, 0, 60.0, 60.0, (ServerGroup(0, 0, 1, "cuda_ipc"),))
    attempt = shard_path.ShardAttempt(store, 1, spec, trainer_rank, 60.0, 60.0)  # type: ignore[arg-type]
    coordinator = Coordinator(ReshardConfig(transport="cuda_ipc"), [], "key")
    with pytest.raises(PlanError, match="trainer rank 0 sends from GPU-0, and rank 0 of server 0 sees GPU-1"):
        shard_path._agree_on_plan(attempt, coordinator)
    assert read(store, attempt.key("go"), Deadline(300.0)) is False


def test_a_number_of_relays_is_refused_where_the_transport_does_not_reach_from_server_to_server() -> None:
    mapped = TransportChoice(("cuda_ipc", "nccl"), "by places")
    apart = world([place("g0")], [place("g1")], [place("g2")])
    for relay in ("auto", "off"):
        assert choose_relay(relay, mapped, apart) == (relay, "")
    assert choose_relay("1", TransportChoice(("nccl", "nccl"), "by places"), apart) == ("1", "")
    with pytest.raises(PlanError, match=r"reshard\.relay=2: the weights travel by cuda_ipc \(by places\), .* use "):
        choose_relay("2", mapped, apart)
    for knobs in ({"transport": "shm"}, {"transport": "cuda_ipc"}, {"path": "full"}):
        with pytest.raises(UserError, match=r"reshard\.relay=2 needs reshard\.path=exact and one of the transports"):
            ReshardConfig(relay="2", **knobs)
    for value in ("0", "-1", "1.5", "many", "", "1000000001"):
        with pytest.raises(UserError, match="must be auto, off, or a number of servers, at least 1"):
            ReshardConfig(relay=value)
    assert [ReshardConfig().relay_among(servers) for servers in (15, 16)] == ["off", "auto"]
    assert [ReshardConfig(relay=relay).relay_among(2) for relay in ("off", "1")] == ["off", "1"]


def test_servers_that_share_a_gpu_send_nothing_on_by_nccl() -> None:
    """Servers of two ranks each: one rank of server 1 has the GPU of another of server 2."""
    ranks = [[place("g1"), place("g2")], [place("g3"), place("g4")], [place("g4"), place("g5")]]
    shared = world([place("g0")], *ranks)
    nccl = TransportChoice(("nccl",) * 3, "by places")
    both = "rank 1 of server 1 and rank 0 of server 2 share g4, which nccl refuses between servers"
    assert choose_relay("auto", nccl, shared) == ("off", f"no relays: {both}")
    for relay in ("1", "2"):
        with pytest.raises(PlanError) as error:
            choose_relay(relay, nccl, shared)
        assert str(error.value) == (
            f"reshard.relay={relay}: {both}; use reshard.relay=auto or off, or reshard.transport=gloo, or give servers "
            "GPUs of their own"
        )
    for relay in ("off", "3"):  # the trainer serves all of them
        assert choose_relay(relay, nccl, shared) == (relay, "")
    for relay, transports, trainers in (("auto", ("nccl", "nccl", "cuda_ipc"), ["g0"]), ("1", ("gloo",) * 3, ["g4"])):
        others = world([place(gpu) for gpu in trainers], *ranks)
        assert choose_relay(relay, TransportChoice(transports, "by places"), others) == (relay, "")


def test_a_session_has_no_relays_between_servers_that_share_a_gpu() -> None:
    session = WeightSession(ReshardConfig(transport="nccl"), [f"127.0.0.1:{port}" for port in range(1, 17)], "key")
    coordinator = session._coordinator
    assert coordinator is not None
    coordinator.active = list(coordinator.links)
    write(session._store, "source/0", NODE_A[0])
    for number, link in enumerate(coordinator.links):
        link.layout, link.transport_name = [place(f"B{number}", "b")], "nccl"
    apart, _ = session._publish_world(coordinator, "nccl", False, Deadline(60.0))
    assert (session._relay, "no relays" in session._transports) == ("auto", False)
    coordinator.links[9].layout = coordinator.links[3].layout
    shared, _ = session._publish_world(coordinator, "nccl", False, Deadline(60.0))
    assert session._relay == read_bulk(session._store, f"world/{shared}", Deadline(300.0))["relay"] == "off"
    assert apart != shared
    assert session._transports.endswith(
        "; no relays: rank 0 of server 3 and rank 0 of server 9 share B3, which nccl refuses between servers"
    )


def test_buckets_fit_the_transport_and_servers_join_anew_for_others() -> None:
    """A server that nccl reaches is admitted to a session whose servers receive by cuda_ipc, in smaller buckets."""
    session = WeightSession(ReshardConfig(), ["127.0.0.1:1", "127.0.0.1:2"], "key")
    coordinator = session._coordinator
    assert coordinator is not None
    write(session._store, "source/0", NODE_A[0])
    first, second = coordinator.links
    first.layout, first.transport_name = [NODE_A[1]], "auto"
    coordinator.active = [first]
    session._publish_world(coordinator, "auto", False, Deadline(60.0))
    assert (first.transport_name, session._bucket_bytes) == ("cuda_ipc", 64 * 2**20)
    second.layout, second.transport_name = [NODE_B[0]], "auto"
    coordinator.active = [first, second]
    with pytest.raises(Retry):
        session._publish_world(coordinator, "auto", False, Deadline(60.0))
    assert second.transport_name == "nccl"
    coordinator.give_up(Retry())
    for link, layout in ((first, NODE_A[1]), (second, NODE_B[0])):
        link.layout, link.transport_name = [layout], "auto"
    session._publish_world(coordinator, "auto", False, Deadline(60.0))
    assert session._bucket_bytes == 256 * 2**20
    session.config = ReshardConfig(bucket_bytes=4096)
    first.transport_name = second.transport_name = "auto"
    session._publish_world(coordinator, "auto", False, Deadline(60.0))
    assert session._bucket_bytes == 4096
