"""What a server rank waits for before it writes weights, and what it reports of a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from megarl.parallel import platform
from megarl.reshard.plan.holdings import Box, Fragment
from megarl.reshard.plan.planner import PlanError
from megarl.reshard.sync import server_rank
from megarl.reshard.sync.attempt import AttemptSpec, ServerGroup, key, write_spec
from megarl.reshard.sync.server_order import ServerOrder
from megarl.reshard.sync.server_rank import LiveWeights, ServerRank
from megarl.reshard.sync.trainer_rank import TrainerRank
from megarl.reshard.transfer.shard_transfer import NO_RELAYS, ReceivedReport, TransferError
from megarl.reshard.transfer.store import Deadline, open_store, read, write_bulk
from tests.unit.reshard.memory_cases import Shard

TRANSPORTS = ("gloo", "shm", "nccl", "cuda_ipc", "full", "disk")


def first_order(store: TCPStore) -> ServerOrder:
    """The order by which a server rank joins the session of `store`."""
    return ServerOrder.of(
        "127.0.0.1", port=store.port, server=0, session=1, epoch=0, join=1, attempt_number=1, deadline_ms=60000
    )


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Order of the synchronisation of the device and of the first write. Both are recorded, neither is made."""
    events: list[str] = []

    def written(*_: Any) -> ReceivedReport:
        events.append("write")
        return ReceivedReport(0, 0)

    receiver = SimpleNamespace(receive=written, read_back=lambda sample: {}, relays=NO_RELAYS)
    monkeypatch.setattr(ServerRank, "_prepare", lambda *_: receiver)
    monkeypatch.setattr(server_rank, "receive_full", written)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    return events


@pytest.fixture
def receive() -> Callable[[str], None]:
    """Carries out one attempt by a transport, on a store of its own."""

    def by(transport: str) -> None:
        store = open_store("127.0.0.1", 60.0)
        order = first_order(store)
        rank = ServerRank(order, LiveWeights([Fragment(0, "a", Box("a", (0,), (2,)), torch.zeros(2))]), 0, 1)
        rank.group = SimpleNamespace()  # joined in an earlier attempt
        path = transport if transport in ("full", "disk") else "exact"
        server = replace(rank.server_group, transport_name=transport)
        spec = AttemptSpec(path, 1, 16, "", False, False, False, 0, 0, 60.0, 60.0, (server,))
        write_spec(store, 1, spec)
        rank.receive_weights(1, Deadline(60.0), lambda tensors: None)

    return by


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_device_is_idle_before_weights_are_written(
    transport: str, events: list[str], receive: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr(platform, "gpu_uuids", list)
    receive(transport)
    assert events == ["synchronize", "write"]


def test_without_a_device_there_is_nothing_to_wait_for(events: list[str], receive: Callable[[str], None]) -> None:
    receive("gloo")
    assert events == ["write"]


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (PlanError("takes 0 of 8 elements", "a"), {"error": "PlanError: takes 0 of 8 elements", "tensor": "a"}),
        (
            TransferError("late", peer="trainer rank 1", tensor="b"),
            {"error": "late", "peer": "trainer rank 1", "tensor": "b"},
        ),
        (OSError("gone"), {"error": "OSError: gone"}),
    ],
)
def test_a_failure_is_reported_with_its_tensor(
    error: Exception, report: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's report may come before the trainer has met the same fault."""
    store = open_store("127.0.0.1", 60.0)
    order = first_order(store)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ServerRank, "receive_weights", fail)
    server_rank.carry_out(order, lambda: LiveWeights([]), 0, 1, lambda tensors: None)
    told = read(ServerGroup(0, 0, 1).private_store(store), key(1, "result", 0), Deadline(60.0))
    assert told.pop("error").endswith(report.pop("error"))
    assert told == report


def test_sides_that_do_not_fit_are_refused_before_a_connection() -> None:
    """One rank after the other: a rank that waited for its peers first would meet its deadline instead."""
    store = open_store("127.0.0.1", 60.0)
    trainer = TrainerRank(store, "127.0.0.1", 0)
    trainer.publish([Shard("a", torch.zeros(2))])
    order = first_order(store)
    boxes = [Fragment(0, name, Box(name, (0,), (2,)), torch.zeros(2)) for name in ("a", "a_scale")]
    server = ServerRank(order, LiveWeights(boxes), 0, 1)
    group = replace(server.server_group, transport_name="gloo")
    world = {
        "sources": [read(store, "source/0", Deadline(60.0))],
        "servers": [[read(server.private_store, "layout/0", Deadline(60.0))]],
        "bucket_bytes": 16,
        "adapters_only": False,
        "relay": "off",
    }
    write_bulk(store, "world/w", world)
    spec = AttemptSpec("exact", 1, 16, "w", False, False, False, 1, 0, 60.0, 60.0, (group,))
    write_spec(store, 1, spec)
    with pytest.raises(PlanError, match="is held by the servers and by no trainer rank"):
        trainer.prepare(spec, Deadline(300.0))
    with pytest.raises(PlanError, match="is held by the servers and by no trainer rank"):
        server.receive_weights(1, Deadline(300.0), lambda tensors: None)
    assert (trainer.groups, server.group) == ({}, None)
