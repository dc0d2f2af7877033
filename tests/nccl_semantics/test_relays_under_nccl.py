"""Syncs in which servers send weights on, by the nccl transport under NCCL's rules, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.reshard.transfer.transports.base import PlainStaging
from megarl.reshard.transfer.transports.nccl import NcclTransport
from tests.distributed.relay_worker import SERVERS, TP, Fleet, relay_of, weights
from tests.nccl_semantics.sync_worker import emulate


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Servers whose ranks emulate NCCL, as this process does during the test."""
    monkeypatch.setattr(NcclTransport, "make_staging", PlainStaging)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", None, raising=False)
    for name in ("current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    emulate(noticed=False)
    fleet = Fleet(tmp_path, emulates_nccl=True)
    yield fleet
    fleet.stop()


def test_relays_deliver_and_one_that_dies_unnoticed_keeps_none_of_the_others_waiting(
    fleet: Fleet, tmp_path: Path
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
    fleet.servers[bad].plant(0, "kill", last)
    report = fleet.push(weights(3))
    others = [server for server in range(SERVERS) if server != bad]
    assert report.servers == tuple(fleet.addresses[server] for server in others)
    assert session.dirty == [fleet.addresses[bad]]
    fleet.assert_served(weights(3), others)
    assert "the trainer has ended the attempt" in "".join(log.read_text() for log in tmp_path.glob("*.log"))
