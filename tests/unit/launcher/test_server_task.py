"""Ends of a server task: its exit code tells the launcher whether the job may go on without it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.launcher import server_task
from megarl.parallel import rendezvous
from megarl.rollout.client.connections import KEY_VARIABLE
from megarl.rollout.servers.sglang_server import ServerError


class Server:
    """Stands for a real SGLang server, which takes half a minute to start: it answers, and its fate is scripted.

    tests/slurm has tasks with real servers; how a server that dies is restarted is in tests/sglang.
    """

    outlook, cause = "starting", None
    age_s = 0.0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.servers, self.addresses = [self], ["127.0.0.1:1"]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def answers(self) -> bool:
        return True


class Supervisor:
    """Knows what the test says of the server."""

    def __init__(self, *_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def outlook(self) -> str:
        return Server.outlook

    def raise_cause(self) -> None:
        if Server.cause is not None:
            raise Server.cause


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a job with one server, whose task runs in this process."""
    monkeypatch.setattr(server_task, "SGLangServers", Server)
    monkeypatch.setattr(server_task, "Supervisor", Supervisor)
    monkeypatch.setattr(server_task, "POLL_S", 0.01)
    for name, value in {rendezvous.JOB_FOLDER: str(tmp_path), KEY_VARIABLE: "k", "MEGARL_SERVER_INDEX": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # set by the task, and restored after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["server_task", "+experiment=gsm8k_grpo"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def exit_code() -> Any:
    with pytest.raises(SystemExit) as ended:
        cli.run_command(server_task.serve)
    return ended.value.code


def test_it_ends_with_0_once_the_trainers_have(folder: Path) -> None:
    rendezvous.publish(folder, rendezvous.ENDED, "")
    assert exit_code() == 0
    assert (folder / rendezvous.server_name(0)).read_text() == "127.0.0.1:1"


def test_it_ends_though_the_file_system_remembers_that_the_name_was_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does for up to a minute. A listing of the folder is new."""
    rendezvous.publish(folder, rendezvous.ENDED, "")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != rendezvous.ENDED and exists(path))
    assert exit_code() == 0


def test_its_server_uses_the_jobs_interface_in_syncs_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would choose one by itself, and on a node with several the trainer may not reach it."""
    monkeypatch.setenv("MEGARL_INTERFACE", "lo")
    rendezvous.publish(folder, rendezvous.ENDED, "")
    assert exit_code() == 0
    assert [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")] == ["lo", "lo"]


def test_it_tells_the_trainers_why_its_server_did_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on other nodes, and would wait for half an hour."""

    def fails(_: Server) -> None:
        raise ServerError("SGLang server 0 ended with exit code 1")

    monkeypatch.setattr(Server, "start", fails)
    with pytest.raises(ServerError, match="exit code 1"):
        cli.run_command(server_task.serve)
    assert (folder / rendezvous.failure_name(0)).read_text() == "SGLang server 0 ended with exit code 1"


def test_it_ends_with_an_error_code_after_too_many_restarts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "outlook", "none")
    assert exit_code() == 1


def test_it_raises_the_cause_where_there_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "outlook", "none")
    monkeypatch.setattr(Server, "cause", ServerError("server 0 died"))
    with pytest.raises(ServerError, match="server 0 died"):
        cli.run_command(server_task.serve)
