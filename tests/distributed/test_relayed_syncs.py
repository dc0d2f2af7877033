"""Syncs in which servers send weights on to others: the same bits, fewer bytes from the trainer, every fault named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from megarl.reshard import config as reshard_config
from megarl.reshard.sync import coordinator
from megarl.reshard.sync.coordinator import WeightSyncError
from tests.distributed.relay_worker import SERVERS, SHAPES, TP, Fleet, relay_of, tell_of_death, weights

MIDDLE = 5  # of the messages that a relay sends on


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    with mock.patch.object(coordinator, "PROBE_S", 300.0):  # a busy machine answers late
        yield fleet
    fleet.stop()


def test_weights_through_relays_are_those_sent_directly_and_the_trainer_sends_them_once(fleet: Fleet) -> None:
    tensors = weights(1)
    fleet.connect(relay="off")
    direct = fleet.push(tensors)
    fleet.assert_served(tensors, list(range(SERVERS)))
    fleet.connect(relay="1")
    once = sum(tensor.nbytes for tensor in tensors.values())
    for seed in (2, 3):  # the same groups and plan serve again
        tensors = weights(seed)
        relayed = fleet.push(tensors)
        fleet.assert_served(tensors, list(range(SERVERS)))
        assert (relayed.bytes, relayed.forwarded) == (once, (SERVERS - 1) * once)
    assert (direct.bytes, direct.forwarded) == (SERVERS * once, 0)
    assert relayed.received == direct.received
    assert relayed.verified == direct.verified >= SERVERS * TP * len(SHAPES)


def test_a_sync_leaves_no_more_keys_in_the_store_than_the_one_before(fleet: Fleet) -> None:
    store: Any = fleet.connect(relay="off")._store
    counts = []
    for seed in (2, 3, 4):
        fleet.push(weights(seed))
        counts.append(store.num_keys())
    assert counts[1] == counts[2]


@pytest.mark.long
def test_deltas_are_sent_on_as_deltas(fleet: Fleet) -> None:
    fleet.connect(relay="2", delta=True)
    tensors = weights(4)
    fleet.push(tensors)
    for step in (1, 2):
        for number, tensor in enumerate(tensors.values()):
            if number % 3:  # some buckets have no change at all
                tensor.view(-1)[step :: tensor.numel() // 7] += step
        report = fleet.push(tensors)
        fleet.assert_served(tensors, list(range(SERVERS)))
        assert report.forwarded > 0
        assert report.bytes + report.forwarded == sum(report.received) < report.dense_bytes / 2
    report = fleet.push(weights(5))  # a delta of everything is larger
    fleet.assert_served(weights(5), list(range(SERVERS)))
    assert sum(report.received) == SERVERS * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.long
def test_auto_spares_the_servers_on_the_trainers_machine_and_few_servers(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the servers say that they are on other machines."""
    for number in (2, 3):
        fleet.replace(number, node=f"node-{number}")
    fleet.connect()
    assert fleet.push(weights(6)).forwarded == 0
    monkeypatch.setattr(reshard_config, "RELAYED_FROM", SERVERS)
    report = fleet.push(weights(7))
    fleet.assert_served(weights(7), list(range(SERVERS)))
    once = sum(tensor.nbytes for tensor in weights(7).values())
    assert (report.bytes, report.forwarded) == (3 * once, once)


@pytest.mark.parametrize(
    ("fault", "phase", "limits"),
    [
        ("kill", "transfer", {}),
        ("flip", "verify", {}),
        pytest.param(
            "hang", "transfer", {"transfer_deadline_s": 30.0, "connect_deadline_s": 30.0}, marks=pytest.mark.long
        ),
    ],
)
def test_a_relay_that_fails_is_named_and_those_behind_it_are_served_by_the_trainer(
    fault: str,
    phase: str,
    limits: dict[str, float],
    fleet: Fleet,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that altered weights on the way, and has right ones itself, serves the version too."""
    session = fleet.connect(relay="1", on_failure="drop_server", **limits)
    fleet.push(weights(8))
    bad = relay_of(fleet)
    if fault == "kill":
        tell_of_death(monkeypatch, fleet.addresses[bad])
    fleet.servers[bad].plant(0, fault, MIDDLE)
    serving = [server for server in range(SERVERS) if server != bad or fault == "flip"]
    caplog.clear()
    report = fleet.push(weights(9))
    assert report.servers == tuple(fleet.addresses[server] for server in serving)
    assert report.forwarded == 0
    assert session.dirty == [address for address in fleet.addresses if address not in report.servers]
    fleet.assert_served(weights(9), serving)
    assert fleet.servers[bad].paused == (fault != "flip")
    dropped = [record.getMessage() for record in caplog.records if "going on without" in record.getMessage()]
    assert f"failed at {fleet.addresses[bad]} in phase {phase}" in dropped[0]
    assert all(fleet.addresses[bad] in text for text in dropped)
    assert "attempt 2 with relays failed; the trainer now sends to each server" in caplog.text
    fleet.replace(bad)
    fleet.connect(relay="1")
    assert fleet.push(weights(10)).forwarded > 0
    fleet.assert_served(weights(10), list(range(SERVERS)))


def test_a_relay_that_alters_weights_stops_the_run_where_the_policy_says_so(fleet: Fleet) -> None:
    session = fleet.connect(relay="1")
    fleet.push(weights(11))
    bad = relay_of(fleet)
    fleet.servers[bad].plant(1, "flip", MIDDLE)
    with pytest.raises(WeightSyncError, match=r"weights that came through it differ from those sent: .*layer") as error:
        fleet.push(weights(12))
    assert (error.value.server, error.value.rank, error.value.phase) == (fleet.addresses[bad], "1", "verify")
    assert error.value.tensor in SHAPES
    assert session.healthy == []
    assert [server.paused for server in fleet.servers] == [True] * SERVERS
    fleet.replace(bad)


@pytest.mark.long
def test_a_relay_that_dies_before_it_connects_is_named(fleet: Fleet) -> None:
    fleet.connect(relay="1", on_failure="drop_server", connect_deadline_s=60.0)
    fleet.servers[0].plant(0, "unconnected", 0)
    report = fleet.push(weights(13))
    assert report.servers == tuple(fleet.addresses[1:])
    fleet.assert_served(weights(13), [1, 2, 3])
    fleet.replace(0)
