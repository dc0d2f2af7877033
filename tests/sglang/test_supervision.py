"""Real servers under a supervisor: stopped or killed, they leave service at once, and come back with the weights."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_rollout import Asks, request
from weights_support import weights_of

from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.reshard.config import ReshardConfig
from megarl.reshard.session import WeightSession
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.config import RolloutConfig
from megarl.rollout.servers import supervisor as supervisor_module
from megarl.rollout.servers.external import ExternalServers
from megarl.rollout.servers.sglang_server import ServerError, SGLangServers
from megarl.rollout.servers.supervisor import Supervisor
from tests.sglang.tiny_models import make_model

HEARTBEAT_S = 60.0  # a stopped or dead process is seen without it
WAIT_S = 300.0


@pytest.fixture(scope="module")
def pair(serve: Callable[..., SGLangServers], tiny_checkpoint: Callable[..., Path]) -> SGLangServers:
    return serve(tiny_checkpoint("qwen3"), n_servers=2)


@pytest.fixture
def supervisor(pair: SGLangServers) -> Iterator[Supervisor]:
    supervisor = Supervisor(pair.servers, HEARTBEAT_S, max_restarts=2)
    supervisor.start()
    yield supervisor
    supervisor.close()


@pytest.fixture
def engine(pair: SGLangServers, supervisor: Supervisor) -> Iterator[RemoteSGLangEngine]:
    engine = RemoteSGLangEngine(RolloutConfig())
    engine.initialize(pair.addresses, api_key=pair.api_key)
    engine.follow(supervisor)
    supervisor.on_change = engine.refresh
    yield engine
    supervisor.on_change = lambda: None
    engine.destroy()


def until(holds: Callable[[], Any], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


def test_a_stopped_server_loses_its_requests_and_comes_back_with_the_weights_though_another_dies_in_the_sync(
    pair: SGLangServers, supervisor: Supervisor, engine: RemoteSGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "DEATH_GRACE_S", 60.0)  # a busy machine ends a process late
    stopped, other = pair.servers
    assert stopped.process is not None
    responses: list[Any] = []
    workflow = Asks()
    work = [{"i": i, "requests": [request([40 + i, 7, 9], max_new_tokens=300)] * 2} for i in range(6)]
    rollout = threading.Thread(target=lambda: responses.append(engine.rollout_batch(work, workflow)))
    rollout.start()
    until(lambda: engine.router._load.get(stopped.address), WAIT_S)  # it has requests
    stats_tracker.export()
    stopped.process.send_signal(signal.SIGSTOP)
    until(lambda: stats_tracker.export().get("rollout/retries"), WAIT_S)  # they are asked again,
    assert engine.addresses == [other.address]  # and not of it
    rollout.join(WAIT_S)
    assert responses[0].num_seqs == 12
    assert len(workflow.responses) == 6

    until(lambda: supervisor.before_sync(WAIT_S)[0] == [stopped.address], WAIT_S)
    assert engine.addresses == [other.address]  # it answers, and is not asked before it has the weights
    session = WeightSession(ReshardConfig(on_failure="stop"), pair.addresses, pair.api_key)
    session.set_death_probe(supervisor.died)
    session.admit(stopped.address)
    weights = weights_of(make_model("qwen3", True, seed=3))
    assert other.process is not None
    other.process.kill()
    report = session.push(weights, 1)
    assert report.servers == (stopped.address,)
    assert report.verified > 0  # by digests
    supervisor.after_sync(session.healthy)
    session.close()
    until(lambda: engine.addresses == [stopped.address], WAIT_S)
    batch = engine.rollout_batch(
        [{"i": i, "requests": [request([50 + i], max_new_tokens=4)]} for i in range(4)], Asks()
    )
    assert set(batch["versions"][batch["loss_mask"]].tolist()) == {1}


def test_servers_that_die_too_often_are_given_up_with_a_typed_error(pair: SGLangServers) -> None:
    pair.wait_ready()  # the test above has one of them started again
    supervisor = Supervisor(pair.servers, HEARTBEAT_S, max_restarts=0)
    supervisor.start()
    try:
        for server in pair.servers:  # one after the other: the error is that of the last
            assert server.process is not None
            server.process.kill()
            until(lambda server=server: server.address not in supervisor.alive(), WAIT_S)
        until(lambda: supervisor.outlook() == "none", WAIT_S)
        assert supervisor.serving() == []
        with pytest.raises(ServerError, match=r"SGLang server 1 at .* ended with exit code -9; its log .* ends:"):
            supervisor.before_sync(WAIT_S)
    finally:
        supervisor.close()


def test_a_server_of_somebody_elses_must_have_the_weight_loader(server: SGLangServers) -> None:
    ExternalServers(server.addresses, server.api_key, WEIGHT_LOADER).wait_ready()
    with pytest.raises(UserError, match=r"start it with --custom-weight-loader another\.loader --weight-version 0"):
        ExternalServers(server.addresses, server.api_key, "another.loader").wait_ready()
    with pytest.raises(UserError, match="answers /server_info with 401"):
        ExternalServers(server.addresses, "not-the-key", WEIGHT_LOADER).wait_ready()


def test_a_server_of_somebody_elses_that_is_gone_is_waited_for_by_nobody(server: SGLangServers) -> None:
    alive = ExternalServers(server.addresses, server.api_key, WEIGHT_LOADER)
    dead = ExternalServers(["127.0.0.1:9"], server.api_key, WEIGHT_LOADER)
    supervisor = Supervisor([*alive.servers, *dead.servers], HEARTBEAT_S, max_restarts=3)
    supervisor.start()
    try:
        until(lambda: supervisor.serving() == alive.addresses, WAIT_S)
        assert supervisor.outlook() == "starting"
    finally:
        supervisor.close()
