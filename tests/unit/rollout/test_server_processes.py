"""How a server tells that one of its processes has ended, while the kernel still takes the others down."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megarl.rollout.servers import sglang_server
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import ServerError, SGLangServer, SGLangServers, still_running

DEADLINE_S = 300.0  # for a hang alone
EXIT = 60 if platform.machine() == "x86_64" else 93  # the call that ends one thread
# Ends its child, which nobody waits for, and then its main thread; another thread stays.
PROGRAM = f"""
import ctypes, subprocess, sys, threading, time
child = subprocess.Popen(["sleep", "1000"])
threading.Thread(target=time.sleep, args=(1000,)).start()
print(child.pid, flush=True)
for line in sys.stdin:
    if line == "child\\n":
        child.kill()
    else:
        ctypes.CDLL(None).syscall({EXIT}, 0)
"""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "too late"
        time.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SGLangServer]:
    """A server whose process is PROGRAM, with one process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    nowhere: Any = SimpleNamespace()
    server = SGLangServer(3, SGLangServerConfig(), nowhere, 1, {"host": "127.0.0.1", "api_key": "k"}, tmp_path)
    server.log_path.write_text("its last line\n")
    server.process, server._family = process, [child]
    yield server
    process.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.kill()
    process.communicate()


def test_a_server_that_is_gone_before_its_exit_code_is_known_is_not_reported_by_its_processes(
    server: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a parent of its own, which takes its exit code first."""
    monkeypatch.setattr(sglang_server, "status_of", lambda pid: sglang_server.GONE)
    assert server.fault() is None


def tell(server: SGLangServer, word: str) -> None:
    assert server.process is not None
    assert server.process.stdin is not None
    server.process.stdin.write(word + "\n")
    server.process.stdin.flush()


def test_a_process_of_the_server_that_ended_is_named(server: SGLangServer) -> None:
    assert server.fault() is None
    (child,) = server._family
    tell(server, "child")
    until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert f"has a process {child.pid} that is zombie; its log" in str(server.fault())


def test_a_server_that_is_ending_is_reported_by_its_exit_code_and_not_by_its_processes(server: SGLangServer) -> None:
    process, (child,) = server.process, server._family
    assert process is not None
    for word, pid in (("child", child.pid), ("itself", process.pid)):
        tell(server, word)
        until(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert process.poll() is None, "a thread is left"
    assert server.fault() is None
    process.kill()
    process.wait(DEADLINE_S)
    assert "ended with exit code -9; its log" in str(server.fault())


def test_a_server_that_is_stopped_is_named(server: SGLangServer) -> None:
    assert server.process is not None
    own = psutil.Process(server.process.pid)
    own.suspend()
    until(lambda: own.status() == psutil.STATUS_STOPPED)
    assert f"has a process {own.pid} that is stopped; its log" in str(server.fault())


def test_a_process_that_nobody_reaps_has_ended(server: SGLangServer) -> None:
    (child,) = server._family
    assert still_running([child], 0.0) == [child]
    child.kill()
    until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert still_running([child], 0.0) == []


def test_a_process_that_ends_while_it_is_killed_is_no_failure(
    server: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server reaps it at any moment."""
    kill = psutil.Process.kill

    def killed_by_another(process: psutil.Process) -> None:
        kill(process)
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "kill", killed_by_another)
    family = [*server._family, psutil.Process(server.process.pid)] if server.process else []
    server.stop()
    assert still_running(family, DEADLINE_S) == []
    assert server.process is None


def test_an_error_names_the_server_though_its_log_cannot_be_read(server: SGLangServer) -> None:
    server.log_path.unlink()
    message = str(server.error("ended"))
    assert message.startswith("SGLang server 3 at 127.0.0.1:1 ended; its log ")
    assert "(it cannot be read: [Errno 2]" in message


def test_all_servers_are_stopped_though_one_cannot_be() -> None:
    stopped = []

    def stop(number: int) -> None:
        stopped.append(number)
        if number < 2:
            raise ServerError(f"server {number} stays")

    def wait_ready() -> None:
        raise ServerError("server 0 has no memory")

    servers = SGLangServers.__new__(SGLangServers)
    each: list[Any] = [SimpleNamespace(stop=lambda n=n: stop(n), wait_ready=wait_ready) for n in range(3)]
    servers.servers, servers._held = each, []
    with pytest.raises(ServerError, match="server 0 stays"):
        servers.stop()
    assert stopped == [0, 1, 2]
    with pytest.raises(ServerError, match="server 0 has no memory"):  # not that it stays
        servers.wait_ready()
    assert stopped == [0, 1, 2] * 2
