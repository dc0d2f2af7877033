"""Order of memory calls of co-located servers and trainer, and what happens when a server fails in one.

Servers are recorded over real HTTP, and the engines' memory is recorded too. `tests/unit/actor/test_offload.py` has
real memory, `tests/e2e/test_colocation.py` real servers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch.distributed as dist

from megarl.rollout.servers.sglang_server import ServerError
from megarl.trainer.rollouts import shared_gpus
from megarl.trainer.rollouts.shared_gpus import ServersInTurn, SharedGpus

ALL = ["kv_cache", "cuda_graph", "weights"]


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Recorder:
    """One server that answers memory calls and notes them; `refuses` names a path that it fails."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls, self.refuses = calls, ""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                recorder.calls.append((self.path.strip("/"), *body.get("tags", ())))
                status = 500 if self.path == recorder.refuses else 200
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class Fleet:
    """The supervisor's answers about one server."""

    def __init__(self, address: str, calls: list[tuple[Any, ...]]) -> None:
        self.address, self.calls = address, calls
        self.number_of_restarts, self.dead = 0, False

    def alive(self) -> list[str]:
        return [self.address]

    def starts(self, address: str) -> int:
        return self.number_of_restarts

    def died(self, address: str) -> bool:
        return self.dead

    def hold_restarts(self) -> None:
        self.calls.append(("hold restarts",))

    def allow_restarts(self) -> None:
        self.calls.append(("allow restarts",))


class Turns:
    """A co-located run's GPUs, with everything that happens to memory in `calls`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, given_up: str = "all") -> None:
        self.calls: list[tuple[Any, ...]] = []
        calls = self.calls

        class Memory:
            def __init__(self, engine: Any) -> None: ...

            def offload(self, *parts: str) -> int:
                calls.append(("trainer gives up", *parts))
                return 0

            def restore(self, *parts: str) -> None:
                calls.append(("trainer takes", *parts))

        monkeypatch.setattr(shared_gpus, "EngineMemory", Memory)
        self.server = Recorder(calls)
        self.fleet = Fleet(self.server.address, calls)
        self.gpus = SharedGpus([object()], given_up)  # type: ignore[list-item]
        self.gpus.for_sampling()  # before the servers begin
        self.gpus.servers = ServersInTurn(self.fleet, "key", 30.0)  # type: ignore[arg-type]

    def taken(self) -> list[tuple[Any, ...]]:
        """Calls since the last time."""
        calls = list(self.calls)
        self.calls.clear()
        return calls


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Turns]:
    turns = Turns(monkeypatch, getattr(request, "param", "all"))
    yield turns
    turns.server.close()


def test_each_side_gives_up_its_memory_before_the_other_takes_it(turns: Turns) -> None:
    assert turns.taken() == [("trainer gives up", "parameters", "gradients", "optimizer")]
    turns.gpus.for_training()
    assert turns.taken() == [
        ("hold restarts",),
        ("pause_generation",),
        ("release_memory_occupation", *ALL),
        ("trainer takes", "parameters", "gradients", "optimizer"),
    ]
    assert not turns.gpus.servers_hold_weights
    turns.gpus.for_sync()
    assert turns.taken() == [
        ("trainer gives up", "gradients", "optimizer"),
        ("allow restarts",),
        ("resume_memory_occupation", "weights"),
        ("trainer takes", "parameters"),
    ]
    turns.gpus.for_sampling()
    assert turns.taken() == [
        ("trainer gives up", "parameters", "gradients", "optimizer"),
        ("resume_memory_occupation", "kv_cache", "cuda_graph"),
    ]
    assert turns.gpus.servers_hold_weights


def test_a_phase_that_holds_already_asks_nobody(turns: Turns) -> None:
    turns.gpus.for_training()
    turns.taken()
    turns.gpus.for_training()
    assert turns.taken() == []


def test_a_sync_between_two_batches_takes_the_cache_and_gives_it_back(turns: Turns) -> None:
    """Servers that lost their weights while sampling: a restarted one waits for them."""
    turns.taken()
    turns.gpus.for_sync()
    assert turns.taken() == [
        ("trainer gives up", "gradients", "optimizer"),
        ("allow restarts",),
        ("pause_generation",),
        ("release_memory_occupation", "kv_cache", "cuda_graph"),
        ("trainer takes", "parameters"),
    ]
    turns.gpus.for_sampling()
    assert turns.taken()[-1] == ("resume_memory_occupation", "kv_cache", "cuda_graph")


def test_a_restarted_server_has_all_of_its_memory(turns: Turns) -> None:
    """SGLang fails on memory that it is to resume and has not given up."""
    turns.gpus.for_training()
    turns.gpus.for_sync()
    turns.fleet.number_of_restarts += 1
    turns.taken()
    turns.gpus.for_sampling()
    assert [call for call in turns.taken() if call[0] == "resume_memory_occupation"] == []


@pytest.mark.parametrize("turns", ["optimizer"], indirect=True)
def test_parameters_may_stay_on_the_gpu(turns: Turns) -> None:
    assert turns.taken() == [("trainer gives up", "gradients", "optimizer")]


@pytest.mark.parametrize("path", ["/pause_generation", "/release_memory_occupation"])
def test_a_server_that_refuses_ends_the_run_and_a_dead_one_does_not(turns: Turns, path: str) -> None:
    turns.server.refuses = path
    with pytest.raises(ServerError, match=rf"server {turns.server.address} failed in /release_memory_occupation of "):
        turns.gpus.for_training()
    turns.fleet.dead = True
    turns.gpus.for_training()
    assert turns.taken()[-1] == ("trainer takes", "parameters", "gradients", "optimizer")


def test_a_server_that_cannot_allocate_again_ends_the_run(turns: Turns) -> None:
    turns.gpus.for_training()
    turns.server.refuses = "/resume_memory_occupation"
    with pytest.raises(ServerError, match="failed in /resume_memory_occupation of weights"):
        turns.gpus.for_sync()
