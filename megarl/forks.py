"""Runs a user's code in supervised processes, forked from one that has imported what they need.

    parent --socket--> fork server, which imports once --fork--> a process for a reward or an environment
      |                                                             ^
      +------------------- socket pair: messages -------------------+

Standard library only, as another interpreter may run the fork server: it finds `megarl` and nothing else of ours. Linux
ends the processes with the thread of the parent that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from megarl.processes import die_with_parent

HEADER = struct.Struct("!Q")
START_DEADLINE_S = 120.0  # includes the imports
FORK_DEADLINE_S = 300.0  # a machine under load forks slowly, and a server that missed it is lost
_ROOT = str(Path(__file__).parents[1])
# `megarl` stays importable by its own path, while nothing else of its folder is.
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from megarl import forks; del sys.path[0]; forks.main()"


class StartError(RuntimeError):
    """The served object failed to be loaded or prepared. Names its error."""


class ForkError(RuntimeError):
    """A fork server did not answer."""


class Served(Protocol):
    """Pickled in the parent; lives in the fork server and its forks."""

    def prepare(self) -> None:
        """Imports what takes long, once for all forks."""

    def serve(self, connection: socket.socket) -> None:
        """Answers messages in a fork until the parent closes."""


class ForkServer:
    """A process that holds `served`, a pickled `Served`, and forks on request. A context manager.

    `name` stands in its command line and in errors. `memory_limit_mb` limits what a fork adds to the address space, in
    MiB. The modules on the parent's `sys.path` are found, unless `interpreter` is another one than the parent's.

    Raises:
        StartError: `served` cannot be loaded or prepared.
        ForkError: the process ended, or did not answer within START_DEADLINE_S.
    """

    def __init__(self, name: str, served: bytes, memory_limit_mb: int, interpreter: str = "") -> None:
        self.name = name
        self._lock = threading.Lock()  # of the control socket
        self._control, child_end = socket.socketpair()
        same = not interpreter or interpreter == sys.executable
        path = sys.path if same else [os.getcwd()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if same:
            environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [
                interpreter or sys.executable,
                "-c",
                _BOOT,
                _ROOT,
                str(child_end.fileno()),
                str(memory_limit_mb * 2**20),
                name,
            ],
            pass_fds=[child_end.fileno()],
            env=environment,
        )
        child_end.close()
        try:
            self._control.settimeout(START_DEADLINE_S)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the process has ended: `_answer` raises
                send(self._control, pickle.dumps((same, path, served)))
            answer = self._answer()
            if "error" in answer:
                raise StartError(answer["error"])
            self._control.settimeout(FORK_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self, child_end: socket.socket) -> int:
        """Forks a process that serves this end of a socket pair; returns its pid.

        Raises:
            ForkError: the fork server does not answer, or missed a deadline before: a late answer would name another
                fork.
        """
        with self._lock:
            if self._control.fileno() < 0:
                raise ForkError(f"the process of {self.name} did not answer before, so it is of no further use")
            try:
                socket.send_fds(self._control, [b"."], [child_end.fileno()])
                return int(self._answer()["pid"])
            except (OSError, ForkError):
                self._control.close()
                raise

    def close(self) -> None:
        """Ends the fork server. Linux ends its forks with it."""
        self._control.close()
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # held by the kernel, it ends when it can
            self._process.wait(FORK_DEADLINE_S)

    def _answer(self) -> dict[str, Any]:
        try:
            message = receive(self._control)
        except (TimeoutError, ConnectionResetError):
            message = None
        if message is None:
            raise ForkError(f"the process of {self.name} did not answer; see its output above")
        answer: dict[str, Any] = json.loads(message)
        return answer


class ForkedProcess:
    """A fork, and the streams to it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.reader = reader
        self.writer = writer
        self.loop = asyncio.get_running_loop()
        self.since = time.monotonic()  # start time of the call that it works on

    @classmethod
    async def connect(cls, server: ForkServer) -> Any:
        """Forks a process from `server` and connects to it.

        Raises:
            ForkError: the fork server does not answer.
        """
        parent_end, child_end = socket.socketpair()

        def fork() -> int:
            with child_end:  # this thread's: a cancellation does not end it
                return server.fork(child_end)

        try:
            pid = await asyncio.to_thread(fork)
        except BaseException:
            parent_end.close()  # what is forked all the same ends with it
            raise
        parent_end.setblocking(False)
        return cls(pid, *await asyncio.open_unix_connection(sock=parent_end))

    def write(self, message: bytes) -> None:
        """Sends one message, preceded by its length."""
        self.writer.write(HEADER.pack(len(message)) + message)

    async def read(self, max_bytes: int | None = None) -> bytes:
        """Reads the next message.

        Raises:
            OverflowError: it has more than `max_bytes`; the process is of no further use.
            ConnectionError, IncompleteReadError: the process has ended.
        """
        (size,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        if max_bytes is not None and size > max_bytes:
            raise OverflowError(size)
        return await self.reader.readexactly(size)

    def kill(self) -> None:
        """Ends the process, and the group that it may lead."""
        kill_group(self.pid)
        if not self.loop.is_closed():
            self.writer.transport.abort()


def kill_group(pid: int) -> None:
    """Ends a process, and the group that it may lead, by SIGKILL."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):  # it leads no group, or has ended already
            end(pid, signal.SIGKILL)


def receive(connection: socket.socket) -> bytes | None:
    """Reads the next message, or None if the other side has closed."""
    header = _exactly(connection, HEADER.size)
    return _exactly(connection, HEADER.unpack(header)[0]) if header is not None else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = io.BytesIO()
    while (missing := size - parts.tell()) > 0:
        chunk = connection.recv(min(missing, 1 << 20))
        if not chunk:
            return None
        parts.write(chunk)
    return parts.getvalue()


def send(connection: socket.socket, message: bytes) -> None:
    """Sends one message, preceded by its length."""
    connection.sendall(HEADER.pack(len(message)) + message)


def address_space() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    """Runs a fork server: `ROOT FD MEMORY_BYTES NAME`, where FD is a Unix socket.

    The first message holds the pickled `Served`; unpickling it is safe, as it comes from the parent. Every later
    message carries one end of a socket pair for a fork.
    """
    control, memory = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    die_with_parent(os.getppid())
    # On Ctrl-C, or on the SIGTERM that Slurm sends to all processes of a job, the trainer finishes its step and still
    # needs these. Use a handler instead of SIG_IGN, which processes started by a fork would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    message = receive(control)
    if message is None:
        return
    try:
        same, path, pickled = pickle.loads(message)
        sys.path[:] = path if same else [*path, *sys.path]
        served: Served = pickle.loads(pickled)
        served.prepare()
    except (Exception, SystemExit) as error:  # the parent raises it
        send(control, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    send(control, json.dumps({"pid": os.getpid()}).encode())
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        server_pid = os.getpid()
        pid = os.fork()
        if pid:
            os.close(descriptors[0])
            try:
                send(control, json.dumps({"pid": pid}).encode())
            except BrokenPipeError:  # the parent waits no more
                return
            continue
        control.close()
        die_with_parent(server_pid)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may start processes and wait for them
        limit = address_space() + memory  # beside what the imports have mapped: gigabytes, of torch for GPUs
        inherited = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if inherited == resource.RLIM_INFINITY else min(limit, inherited)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            served.serve(socket.socket(fileno=descriptors[0]))
        os._exit(0)
