"""A fork server that answered too late is not asked again: its answer would name another fork."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket

import psutil
import pytest

from megarl.environments.host import Host
from megarl.forks import ForkedProcess, ForkError, ForkServer


def test_after_a_fork_without_an_answer_all_later_ones_are_refused() -> None:
    served = pickle.dumps(Host("tests.unit.environments.worlds.Count", {}, os.devnull))
    ours, theirs = socket.socketpair()
    with ForkServer("megarl.environments.host", served, 4096) as server, ours, theirs:
        assert psutil.Process(server.fork(theirs)).ppid() == server._process.pid
        server._process.send_signal(signal.SIGSTOP)
        server._control.settimeout(0.1)
        with pytest.raises(ForkError, match="did not answer; see its output"):
            server.fork(theirs)
        server._process.send_signal(signal.SIGCONT)
        with pytest.raises(ForkError, match="did not answer before"):
            server.fork(theirs)


def test_a_fork_that_is_cancelled_while_it_waits_leaves_the_server_of_use() -> None:
    """The thread that asks for it goes on, and must not find its socket closed."""
    served = pickle.dumps(Host("tests.unit.environments.worlds.Count", {}, os.devnull))

    async def cancelled(server: ForkServer) -> None:
        with server._lock:  # as while another fork is under way
            connecting = asyncio.ensure_future(ForkedProcess.connect(server))
            await asyncio.sleep(0.2)
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        process = await ForkedProcess.connect(server)
        assert psutil.Process(process.pid).ppid() == server._process.pid
        process.writer.close()

    with ForkServer("megarl.environments.host", served, 4096) as server:
        asyncio.run(cancelled(server))
