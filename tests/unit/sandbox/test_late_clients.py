"""A client or a server of the sandbox that cannot go on for a while: the program is not blamed for it."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from megarl.sandbox import client, run_python, server


def computes(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("passes", [computes, time.sleep], ids=["computes", "waits"])
def test_a_wait_for_a_slow_client_is_no_sleep(passes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program waits for its input, as this thread computes, or waits for a lock, between any two parts of it."""
    write = client._Run._write

    def late(run: client._Run) -> bool:
        passes(0.2)
        return write(run)

    monkeypatch.setattr(client._Run, "_write", late)
    text = "x" * 10 * client.CHUNK
    done = run_python("print(len(input()))", stdin=text, time_limit_s=1.0, wall_limit_s=300.0)
    assert (done.status, done.stdout) == ("ok", f"{len(text)}\n")
    assert done.sleep_s < 1.0


@pytest.mark.parametrize("when", ["before it looks", "as it wakes"])
def test_a_client_that_cannot_go_on_makes_no_sleep(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client stops once for three times the limit, as where another thread has the interpreter for long."""
    select, stops = selectors.DefaultSelector.select, iter([3.0])

    def stopping(selector: selectors.DefaultSelector, timeout: float | None = None) -> Any:
        if when == "before it looks":
            time.sleep(next(stops, 0.0))
            return select(selector, timeout)
        ready = select(selector, timeout)
        time.sleep(next(stops, 0.0))
        return ready

    monkeypatch.setattr(selectors.DefaultSelector, "select", stopping)
    done = run_python("print(input())", "x", time_limit_s=1.0, wall_limit_s=300.0)
    assert (done.status, done.stdout) == ("ok", "x\n")


def test_a_program_that_ended_before_its_wall_time_was_looked_at_has_ended() -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with ours, theirs:
        assert server._supervise(pid, ours, 5.0, 0.0)["ended"] == "exit"
