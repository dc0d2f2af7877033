"""Real servers under a supervisor: stopped or killed, they leave service at once, and wait for the weights."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_rollout import Asks, request

from megarl.knobs import UserError
from megarl.reshard.sglang import WEIGHT_LOADER
from megarl.rollout.external import ExternalServers
from megarl.rollout.sglang_client import RemoteSGLangEngine, RolloutConfig
from megarl.rollout.sglang_server import ServerError, SGLangServers
from megarl.rollout.supervisor import Supervisor

HEARTBEAT_S = 5.0
WAIT_S = 90.0


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


@pytest.mark.timeout(240)
def test_a_stopped_server_loses_its_requests_to_the_others_and_is_not_asked_without_the_weights(
    pair: SGLangServers, supervisor: Supervisor, engine: RemoteSGLangEngine
) -> None:
    stopped = pair.servers[0]
    assert stopped.process is not None
    responses: list[Any] = []
    workflow = Asks()
    work = [{"i": i, "requests": [request([40 + i, 7, 9], max_new_tokens=300)] * 2} for i in range(6)]
    rollout = threading.Thread(target=lambda: responses.append(engine.rollout_batch(work, workflow)))
    rollout.start()
    until(lambda: engine.router._load.get(stopped.address), WAIT_S)  # it has requests
    stopped.process.send_signal(signal.SIGSTOP)
    until(lambda: engine.addresses == [pair.addresses[1]], 2 * HEARTBEAT_S)
    rollout.join(WAIT_S)
    assert responses[0].num_seqs == 12
    assert len(workflow.responses) == 6

    until(lambda: supervisor.before_sync(WAIT_S)[0] == [stopped.address], WAIT_S)
    assert engine.addresses == [pair.addresses[1]]  # it answers, and is not asked before it has the weights


@pytest.mark.timeout(240)
def test_servers_that_die_too_often_are_given_up_with_a_typed_error(pair: SGLangServers) -> None:
    supervisor = Supervisor(pair.servers, HEARTBEAT_S, max_restarts=0)
    supervisor.start()
    try:
        for server in pair.servers:
            assert server.process is not None
            server.process.kill()
        until(lambda: supervisor.outlook() == "none", 2 * HEARTBEAT_S)
        assert supervisor.serving() == []
        with pytest.raises(ServerError, match=r"SGLang server 0 at .*; its log .* ends:"):
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
    supervisor = Supervisor([*alive.servers, *dead.servers], 0.5, max_restarts=3)
    supervisor.start()
    try:
        until(lambda: supervisor.serving() == alive.addresses, 20)
        assert supervisor.outlook() == "starting"
    finally:
        supervisor.close()
