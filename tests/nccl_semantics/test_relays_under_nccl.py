"""Syncs in which servers send weights on, by the nccl transport under NCCL's rules, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from megarl.reshard import config
from megarl.reshard.sync import coordinator
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.transfer.transports.base import PlainStaging
from megarl.reshard.transfer.transports.nccl import NcclTransport
from tests.distributed.relay_worker import SERVERS, TP, Fleet, relay_of, tell_of_death, weights
from tests.nccl_semantics import process_group_nccl
from tests.nccl_semantics.sync_worker import emulate

SHARED = [["g0", "g1"], ["g2", "g3"], ["g2", "g3"], ["g4", "g5"]]


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Servers whose ranks emulate NCCL, as this process does during the test; the parameter has their GPUs."""
    monkeypatch.setattr(coordinator, "PROBE_S", 300.0)  # a busy machine answers late
    monkeypatch.setattr(NcclTransport, "make_staging", PlainStaging)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", None, raising=False)
    for name in ("current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    emulate(noticed=False)
    fleet = Fleet(tmp_path, True, *([request.param] if hasattr(request, "param") else []))
    yield fleet
    fleet.stop()


def test_relays_deliver_and_one_that_dies_unnoticed_keeps_none_of_the_others_waiting(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL does not tell those behind the relay that it has died. They learn it from the trainer, which serves them."""
    session = fleet.connect(relay="1", transport="nccl", on_failure="drop_server")
    for seed in (1, 2):
        report = fleet.push(weights(seed))
        fleet.assert_served(weights(seed), list(range(SERVERS)))
        assert report.forwarded == (SERVERS - 1) * report.bytes
    bad = relay_of(fleet)
    assert session.plan is not None
    last = sum(1 for _ in session.plan.forwards(bad * TP))  # the trainer has sent everything by then
    tell_of_death(monkeypatch, fleet.addresses[bad])
    fleet.servers[bad].plant(0, "kill", last)
    report = fleet.push(weights(3))
    others = [server for server in range(SERVERS) if server != bad]
    assert report.servers == tuple(fleet.addresses[server] for server in others)
    assert session.dirty == [fleet.addresses[bad]]
    fleet.assert_served(weights(3), others)
    assert "the trainer has ended the attempt" in "".join(log.read_text() for log in tmp_path.glob("*.log"))


shared_gpu = pytest.mark.parametrize("fleet", [SHARED], indirect=True, ids=["a GPU of two servers"])


@shared_gpu
def test_servers_on_one_gpu_are_served_by_the_trainer_itself(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one GPU would be an NCCL communicator: the plan lets each server send to each other one."""
    monkeypatch.setattr(config, "RELAYED_FROM", 2)
    fleet.connect(relay="auto", transport="nccl")
    report = fleet.push(weights(1))
    fleet.assert_served(weights(1), list(range(SERVERS)))
    assert report.forwarded == 0
    assert "no relays: rank 0 of server 1 and rank 0 of server 2 share g2, which nccl refuses" in report.transports


@shared_gpu
def test_a_number_of_relays_is_refused_before_servers_on_one_gpu_join(fleet: Fleet, tmp_path: Path) -> None:
    session = fleet.connect(relay="1", transport="nccl")
    with pytest.raises(WeightSyncError, match=r"reshard\.relay=1: rank 0 of server 1 and rank 0 of server 2 share g2,"):
        fleet.push(weights(1))
    assert session._trainer_rank.groups == {}
    assert "Duplicate GPU" not in "".join(log.read_text() for log in tmp_path.glob("*.log"))


def test_the_emulation_refuses_two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group_nccl, "GPU", "g0")
    options = process_group_nccl.Options()
    store = HashStore()
    ends = [process_group_nccl.ProcessGroupNCCL(store, rank, 2, options) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ends[0].send, [torch.ones(1)], 1, 0), pool.submit(ends[1].recv, [torch.ones(1)], 0, 0)]
        errors = [str(call.exception(300)) for call in calls]
    assert errors == ["Duplicate GPU detected : rank 0 and rank 1 both on CUDA device g0"] * 2
