"""Syncs that fail: each ends by its deadline and names the cause, no server serves a mix, the policy decides."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy
from test_weights_layouts import Trainer
from weights_support import TOLERANCE, Served, weights_of

from megarl.reshard.config import ReshardConfig
from megarl.reshard.session import WeightSession
from megarl.reshard.sync import coordinator
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.sync.server_control import PendingCall, ServerControl
from megarl.reshard.transfer.store import Deadline
from megarl.reshard.transfer.transports.gloo import GlooTransport
from megarl.rollout.servers.sglang_server import SGLangServer, SGLangServers
from tests.held_ports import held_port
from tests.sglang.tiny_models import make_model

VICTIM = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def served(fleet: SGLangServers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """All three servers, at known weights. After the test, a sync by a new trainer mends them."""
    monkeypatch.setattr(coordinator, "PROBE_S", 300.0)  # a busy server that is mended answers late
    served = Served(fleet, 3, bucket_bytes=65536, on_failure="drop_server")
    served.push(weights_of(make_model("qwen3", True, seed=100)))
    yield served
    served.session.close()
    after = Served(fleet, 3, bucket_bytes=65536)
    model = make_model("qwen3", True, seed=101)
    after.push(weights_of(model))
    assert [after.difference(model, server) < TOLERANCE for server in range(3)] == [True] * 3
    after.session.close()


def kill(server: SGLangServer) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(300)


def restart(server: SGLangServer, *, elsewhere: bool) -> str:
    """Restarts a server, on another port if `elsewhere`. Returns its address."""
    server.stop()
    if elsewhere:
        server.port = held_port()
        server.args["port"] = server.port
    server.start()
    server.wait_ready()
    return server.address


def keeps_silent(served: Served, server: int) -> bool:
    """True if a request gets no answer, as from a paused server."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(served.generate(4, server=server))
        except OSError:
            return  # it is stopped, or mended too late for this request

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(1)
    return answers == []


def before_send(monkeypatch: pytest.MonkeyPatch, message: int, act: Callable[[GlooTransport, int, int], None]) -> None:
    """Calls `act(transport, slot, peer)` before the message of that number is sent."""
    send, tags = GlooTransport.send, []

    def acting(self: GlooTransport, slot: int, nbytes: int, peer: int, tag: int) -> Any:
        tags.append(tag)
        if len(tags) == message:
            act(self, slot, peer)
        return send(self, slot, nbytes, peer, tag)

    monkeypatch.setattr(GlooTransport, "send", acting)


def corrupt(monkeypatch: pytest.MonkeyPatch, message: int) -> None:
    """Flips a bit of the message of that number, on its way to one server: others may be sent the same bucket."""
    send, tags = GlooTransport.send, []

    def acting(self: GlooTransport, slot: int, nbytes: int, peer: int, tag: int) -> Any:
        tags.append(tag)
        if len(tags) != message:
            return send(self, slot, nbytes, peer, tag)
        assert self.staging is not None
        payload = self.staging.slots[slot][:nbytes].clone()
        payload[9] ^= 1
        return self.send_tensor(payload, peer, tag)

    monkeypatch.setattr(GlooTransport, "send", acting)


def test_a_server_killed_in_the_middle_is_dropped_and_served_again_where_it_comes_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, address = served.servers.servers[1], served.addresses[1]
    with monkeypatch.context() as patch:
        before_send(patch, 5, lambda *_: kill(lost))
        model = make_model("qwen3", True, seed=40)
        report = served.push(weights_of(model))
    others = (served.addresses[0], served.addresses[2])
    assert report.servers == others
    assert (served.session.healthy, served.session.dirty) == (list(others), [address])
    assert [served.difference(model, server) < TOLERANCE for server in (0, 2)] == [True] * 2

    assert served.push(weights_of(make_model("qwen3", True, seed=41))).servers == others  # it is dead before pause
    strict = WeightSession(ReshardConfig(control_deadline_s=300), served.addresses, served.servers.api_key)
    with pytest.raises(WeightSyncError, match="Connection refused") as error:
        strict.push(weights_of(make_model("qwen3", True, seed=42)), served.version + 1)
    assert (error.value.server, error.value.phase) == (address, "check")
    strict.close()

    served.session.remove(address)
    served.session.admit(restart(lost, elsewhere=True))
    assert lost.address != address
    assert served.session.dirty == [lost.address]
    model = make_model("qwen3", True, seed=43)
    served.push(weights_of(model))
    assert set(served.session.healthy) == set(served.servers.addresses)
    assert served.difference(model, 1) < TOLERANCE
    served.addresses = served.servers.addresses


def test_a_server_killed_before_it_was_told_its_version_is_resynced_before_its_first_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = served.servers.servers[1]
    send = ServerControl.send

    def killing(self: ServerControl, path: str, body: Any, deadline: Deadline) -> PendingCall:
        if (self.address, path) == (lost.address, "/update_weight_version"):
            kill(lost)
        return send(self, path, body, deadline)

    model = make_model("qwen3", True, seed=50)
    with monkeypatch.context() as patch:
        patch.setattr(ServerControl, "send", killing)
        report = served.push(weights_of(model))
    assert served.session.dirty == [lost.address]
    assert report.servers == (served.addresses[0], served.addresses[2])
    # It was proven and died afterwards: only the parts of servers that hold the version are counted.
    without = served.push(weights_of(model))
    assert (report.servers, report.verified) == (without.servers, without.verified)
    assert served.difference(model, 0) < TOLERANCE
    served.session.admit(restart(lost, elsewhere=False))
    assert served.session.dirty == [lost.address]
    report = served.session.resync(weights_of(model))
    assert report.version == served.version
    assert served.session.dirty == []
    assert [served.control(i).model_info(Deadline(120))["weight_version"] for i in range(3)] == [
        str(served.version)
    ] * 3
    assert served.difference(model, 1) < TOLERANCE


def test_a_flipped_byte_is_noticed_and_named_and_its_server_answers_nothing_until_mended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.version
    with monkeypatch.context() as patch:
        corrupt(patch, 2)
        report = served.push(weights_of(make_model("qwen3", True, seed=4)))
    (bad,) = served.session.dirty
    index = served.addresses.index(bad)
    assert bad not in report.servers
    assert served.control(index).model_info(Deadline(120))["weight_version"] == str(before)
    assert keeps_silent(served, index)
    model = make_model("qwen3", True, seed=5)
    served.push(weights_of(model))
    assert served.session.dirty == []
    assert served.difference(model, index) < TOLERANCE


def test_a_flipped_byte_stops_the_run_where_the_policy_says_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session = served.restart_session(on_failure="stop")
    with monkeypatch.context() as patch:
        corrupt(patch, 2)
        with pytest.raises(WeightSyncError, match=r"rank \d does not hold what was sent of model\.") as error:
            served.push(weights_of(make_model("qwen3", True, seed=4)))
    assert error.value.phase == "verify"
    assert error.value.tensor.startswith("model.")
    assert error.value.server in served.addresses
    assert session.healthy == []
    assert [keeps_silent(served, server) for server in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("path", "fault", "phase"),
    [
        ("/pause_generation", "refuse", "pause"),
        pytest.param("/update_weights_from_tensor", "silence", "connect", marks=pytest.mark.long),
        pytest.param("/end_weight_update", "silence", "end", marks=pytest.mark.long),
        ("/update_weight_version", "refuse", "version"),
    ],
)
def test_a_server_that_refuses_or_never_answers_is_dropped_within_the_deadline(
    path: str, fault: str, phase: str, served: Served
) -> None:
    proxy = FaultProxy(served.addresses[1])
    addresses = [served.addresses[0], proxy.address]
    at_fault = "connect" if phase == "connect" else "control"  # the others bind healthy servers alone
    deadlines = {
        f"{name}_deadline_s": 20.0 if fault == "silence" and name == at_fault else 300.0
        for name in ("control", "connect", "transfer")
    }
    config = ReshardConfig(**deadlines, on_failure="drop_server")
    session = WeightSession(config, addresses, served.servers.api_key)
    strict = WeightSession(replace(config, on_failure="stop"), addresses, served.servers.api_key)
    proxy.faults[path] = fault
    try:
        start = time.monotonic()
        model = make_model("qwen3", True, seed=60)
        served.version += 1
        report = session.push(weights_of(model), served.version)
        assert time.monotonic() - start < 300
        assert report.servers == (addresses[0],)
        assert session.dirty == [proxy.address]
        assert served.difference(model) < TOLERANCE
        assert keeps_silent(served, 1) or phase == "pause"
        served.version += 1
        with pytest.raises(WeightSyncError) as error:
            strict.push(weights_of(model), served.version)
        assert error.value.server == proxy.address
        assert error.value.phase == phase
    finally:
        session.close()
        strict.close()
        proxy.stop()


def test_a_server_that_dies_before_the_transfer_and_is_looked_after_takes_no_other_with_it(served: Served) -> None:
    proxy = FaultProxy(served.addresses[1])
    addresses = [served.addresses[0], proxy.address, served.addresses[2]]
    session = WeightSession(
        ReshardConfig(control_deadline_s=300, connect_deadline_s=300), addresses, served.servers.api_key
    )
    session.set_death_probe(lambda address: address == proxy.address)
    try:
        served.version += 1
        session.push(weights_of(make_model("qwen3", True, seed=70)), served.version)
        proxy.faults["/update_weights_from_tensor"] = "end"
        model = make_model("qwen3", True, seed=71)
        served.version += 1
        assert session.push(weights_of(model), served.version).servers == (addresses[0], addresses[2])
        assert session.dirty == [proxy.address]
        assert [served.difference(model, server) < TOLERANCE for server in (0, 2)] == [True] * 2
    finally:
        session.close()
        proxy.stop()


@pytest.mark.parametrize("moment", ["before", pytest.param("while", marks=pytest.mark.long)])
def test_a_server_that_hangs_is_dropped_when_its_deadline_passes(
    moment: str, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From then on a call's deadline comes soon for this server alone: busy ones may answer late."""
    send = ServerControl.send

    def sending(self: ServerControl, path: str, body: Any, deadline: Deadline) -> PendingCall:
        call = send(self, path, body, deadline)
        result = call.result

        def soon(deadline: Deadline) -> dict[str, Any]:
            short = Deadline(deadline.seconds)
            short.end = min(deadline.end, time.monotonic() + 2.0)
            return result(short)

        if self.address == served.addresses[0]:
            monkeypatch.setattr(call, "result", soon)
        return call

    scheduler = served.scheduler()

    def hang(patch: pytest.MonkeyPatch) -> None:
        scheduler.suspend()
        patch.setattr(ServerControl, "send", sending)

    served.push(weights_of(make_model("qwen3", True, seed=4)))
    deadlines = {"control_deadline_s": 301.0, "transfer_deadline_s": 300.0, "connect_deadline_s": 300.0}
    if moment == "while":
        deadlines["transfer_deadline_s"] = 60.0
    served.restart_session(**deadlines)
    start = time.monotonic()
    with monkeypatch.context() as patch:
        try:
            if moment == "before":
                hang(patch)
            else:
                before_send(patch, 4, lambda *_: hang(patch))
            report = served.push(weights_of(make_model("qwen3", True, seed=5)))
        finally:
            scheduler.resume()
    assert time.monotonic() - start < 300
    assert report.servers == tuple(served.addresses[1:])
    assert served.session.dirty == served.addresses[:1]
    assert moment == "while" or "within 301 s" in caplog.text


def test_a_trainer_rank_killed_in_the_middle_ends_the_others_and_leaves_no_mix(
    served: Served, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    version = served.version + 1
    trainer = Trainer(tmp_path / "trainer", 2)
    (*_, failure), first = trainer.run(
        checkpoint=str(tiny_checkpoint("qwen3")),
        layout={"tp_size": 2},
        addresses=served.addresses,
        api_key=served.servers.api_key,
        versions=[version, version + 1],
        victim=1,
        reshard={"bucket_bytes": 65536, "transfer_deadline_s": 300, "connect_deadline_s": 300},
    )
    trainer.end()
    assert [line[0] for line in first] == [version]
    assert failure["rank"] == "trainer rank 1"
    assert "trainer rank 1 did not report that it has sent its part" in failure["failed"]
    assert failure["phase"] == "transfer"
    assert [keeps_silent(served, server) for server in range(3)] == [True] * 3
    served.version = version + 1
