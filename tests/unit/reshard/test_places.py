"""Transports that the ranks' machines or GPUs rule out are refused before the transfer, with both ranks named."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from megarl.reshard.config import ReshardConfig
from megarl.reshard.plan.holdings import Box, Fragment
from megarl.reshard.plan.planner import PlanError
from megarl.reshard.plan.transfer_plan import Messages
from megarl.reshard.session import WeightSession
from megarl.reshard.sync import shard_path
from megarl.reshard.sync.attempt import AttemptSpec, ServerGroup
from megarl.reshard.sync.coordinator import Coordinator
from megarl.reshard.sync.places import check_places, check_visible
from megarl.reshard.sync.world import publish_fragments
from megarl.reshard.transfer.store import Deadline, read, write, write_bulk


def place(gpu: str = "", node: str = "a", visible: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"holdings": "", "node": node, "gpu": gpu, "visible_gpus": list(visible or ((gpu,) if gpu else ()))}


def world(sources: list[dict[str, Any]], *servers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"sources": sources, "servers": list(servers), "bucket_bytes": 16}


def between(*pairs: tuple[int, int]) -> Messages:
    """One message of a plan for each (trainer rank, server rank)."""
    source, destination = np.array(pairs).T
    return Messages(np.zeros(len(pairs), dtype=np.int64), source, destination)


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
    check_visible(between((0, 0), (1, 1)), hidden)
    with pytest.raises(PlanError) as error:
        check_visible(between((0, 0), (1, 1), (0, 1)), hidden)
    assert str(error.value) == (
        "reshard.transport=cuda_ipc: trainer rank 0 sends from GPU-0, and rank 0 of server 1 sees GPU-1; use nccl or "
        "gloo, or add that GPU to the server's CUDA_VISIBLE_DEVICES"
    )
    hidden["servers"][1][0]["visible_gpus"] = ["GPU-1", "GPU-0"]
    check_visible(between((0, 1)), hidden)


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
    coordinator.active[0].layout = [place("GPU-0")]
    write(session._store, "source/0", place("GPU-0"))
    assert session._publish_world(coordinator, "gloo", Deadline(60.0))
    with pytest.raises(PlanError, match="trainer rank 0 and rank 0 of server 0 share GPU-0"):
        session._publish_world(coordinator, "nccl", Deadline(60.0))


def test_cuda_ipc_is_refused_before_the_ranks_are_told_to_begin() -> None:
    """The plan is fixed: one message from trainer rank 0 to the server."""
    store = HashStore()
    write_bulk(store, "world/w", world([place("GPU-0")], [place("GPU-1")]))
    trainer_rank = SimpleNamespace(rank=0, prepare=lambda *_: "hash", plan=SimpleNamespace(messages=between((0, 0))))
    spec = AttemptSpec("cuda_ipc", 1, 16, "w", False, False, 0, 0, (ServerGroup(0, 0, 1),))
    attempt = shard_path.ShardAttempt(store, 1, spec, trainer_rank, 60.0, 60.0)  # type: ignore[arg-type]
    coordinator = Coordinator(ReshardConfig(transport="cuda_ipc"), [], "key")
    with pytest.raises(PlanError, match="trainer rank 0 sends from GPU-0, and rank 0 of server 0 sees GPU-1"):
        shard_path._agree_on_plan(attempt, coordinator)
    assert read(store, attempt.key("go"), Deadline(1.0)) is False
