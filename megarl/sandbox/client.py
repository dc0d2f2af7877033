"""Client of the servers that fork isolated processes: pipes in and out, limits, and the pair of program and judge."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.sandbox.activity import worked_s
from megarl.sandbox.isolation import Features

START_S = 120.0  # for a server to start on a busy machine
GRACE_S = 30.0  # for a server to end
LEAST_WALL_S = 10.0
WALL_PER_CPU_S = 5.0  # wall seconds per processor second before a run on a busy machine is given up
CHUNK = 65_536
_BOOT = "import sys; sys.path.insert(0, sys.argv[3]); from megarl.sandbox import server; del sys.path[0]; server.main()"
_ROOT = str(Path(__file__).parents[2])


class SandboxError(RuntimeError):
    """Raised if the sandbox itself could not be set up. The code did not run."""


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a run: its status, its output, and its seconds of processor time and of sleep.

    `status` is "ok" (exit code 0), "failed", "time" (limit of processor time), "sleep" (the same limit), "output"
    (limit), or "wall": the machine was too busy to give the run its processor time. Nothing is known of the code then.
    """

    status: str
    stdout: str
    stderr: str
    cpu_s: float = dataclasses.field(default=0.0, compare=False)
    sleep_s: float = dataclasses.field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def run_python(
    code: str,
    stdin: str = "",
    *,
    time_limit_s: float = 5.0,
    wall_limit_s: float | None = None,
    memory_limit_mb: int = 512,
    output_limit: int = 65_536,
    features: Features | None = None,
) -> SandboxResult:
    """Runs `code` as a script with the text `stdin` as its input.

    It has at most `time_limit_s` seconds of processor time, and as many of sleep. `wall_limit_s` defaults to five times
    that, and at least 10. `memory_limit_mb` is in MiB. `output_limit` is in bytes, for stdout and stderr each.

    Raises:
        SandboxError: this machine cannot isolate code.
    """
    limits = _Limits(time_limit_s, wall_limit_s, memory_limit_mb, output_limit, features or Features())
    with _servers(1) as (server,):
        run = _Run(server, code, limits, stdin=stdin)
        _communicate([run], limits.wall_s)
    return run.result()


def check_statement(
    code: str,
    statement: str,
    *,
    time_limit_s: float = 5.0,
    wall_limit_s: float | None = None,
    memory_limit_mb: int = 512,
    features: Features | None = None,
) -> SandboxResult:
    """Runs `code`, then judges `statement`, such as `assert add(1, 2) == 3`, in another isolated process.

    The program's process gets calls and answers with data: it never holds the statement or the verdict. `status` is
    "ok" if the statement holds. See `megarl.sandbox.judge` for what a statement may do.

    Raises:
        SandboxError: this machine cannot isolate code.
    """
    limits = _Limits(time_limit_s, wall_limit_s, memory_limit_mb, CHUNK, features or Features())
    with _servers(2) as servers:
        to_program, to_judge = os.pipe(), os.pipe()
        try:
            program = _Run(servers[0], code, limits, channel=(to_program[0], to_judge[1]))
            judge = _Run(servers[1], statement, limits, channel=(to_judge[0], to_program[1]), judge=True)
        finally:
            for descriptor in (*to_program, *to_judge):
                os.close(descriptor)
        judge.at_end = program.stop
        _communicate([program, judge], limits.wall_s)
    verdict, run = judge.result(), program.result()
    limit = run.status in ("wall", "time", "sleep", "output")
    status = "ok" if verdict.ok else run.status if limit else verdict.status
    return SandboxResult(status, run.stdout, run.stderr + verdict.stderr, run.cpu_s + verdict.cpu_s, run.sleep_s)


@dataclass(frozen=True)
class _Limits:
    cpu_s: float
    given_wall_s: float | None
    memory_mb: int
    output: int
    features: Features

    @property
    def wall_s(self) -> float:
        return self.given_wall_s or max(LEAST_WALL_S, WALL_PER_CPU_S * self.cpu_s)


class _Server:
    """A process that forks isolated ones, and the socket to it. It ends when the socket closes."""

    def __init__(self) -> None:
        self.control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", "-c", _BOOT, str(child_end.fileno()), tempfile.gettempdir(), _ROOT]
        with child_end:
            self.process = subprocess.Popen(
                command,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def close(self) -> None:
        """Ends the server, and the process that it runs."""
        self.control.close()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # held by the kernel, it ends when it can
                self.process.wait(GRACE_S)


_idle: collections.deque[_Server] = collections.deque()
_all: weakref.WeakSet[_Server] = weakref.WeakSet()


def close() -> None:
    """Ends the idle servers of this process. The next run starts new ones."""
    while _idle:
        _idle.pop().close()


def _after_fork() -> None:
    """Leaves the servers to the parent: they end when the parent closes the last copy of their sockets."""
    for server in list(_all):
        server.control.close()
        server.process.returncode = 0  # not a child of this process
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _servers(count: int) -> Iterator[list[_Server]]:
    """Lends servers that nobody else uses; starts them if none is idle. After an error they are ended."""
    lent: list[_Server] = []
    try:
        while len(lent) < count:
            try:
                server = _idle.pop()
            except IndexError:
                server = _Server()
                _all.add(server)
            if server.process.poll() is None:
                lent.append(server)
            else:
                server.control.close()
        yield lent
    except BaseException:
        for server in lent:
            server.close()
        raise
    _idle.extend(lent)


class _Run:
    """One isolated process: its pipes, and how it ended."""

    def __init__(
        self,
        server: _Server,
        code: str,
        limits: _Limits,
        *,
        stdin: str = "",
        channel: tuple[int, ...] = (),
        judge: bool = False,
    ) -> None:
        source = code.encode(errors="surrogatepass")
        self.server = server
        self.limits = limits
        self.unsent = memoryview(source + stdin.encode(errors="surrogatepass"))
        self.output = {"stdout": b"", "stderr": b"", "error": b""}
        self.exceeded = False
        self.report: dict[str, float | str] = {}
        self.activity: dict[str, float] = {}  # while it runs; see `activity.Activity.summary`
        self.told = math.inf  # when the server sent what was just read, by the clock of all processes
        self.sleep_s = 0.0  # together with the other run of a pair
        self.overslept = False
        self.at_end: Callable[[], None] = lambda: None
        request = {
            "judge": judge,
            "code_bytes": len(source),
            "cpu_limit_s": limits.cpu_s,
            "wall_limit_s": limits.wall_s,
            "memory": limits.memory_mb * 2**20,
            "features": dataclasses.asdict(limits.features),
        }
        self.begun = time.monotonic()
        child_in, self.stdin = os.pipe()
        pipes = {name: os.pipe() for name in self.output}
        self.outputs = {name: read_end for name, (read_end, _) in pipes.items()}
        child_ends = [child_in, *(write_end for _, write_end in pipes.values())]
        try:
            socket.send_fds(server.control, [json.dumps(request).encode()], [*child_ends, *channel])
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox's server has ended ({error}); see its output above") from error
        finally:
            for descriptor in child_ends:
                os.close(descriptor)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Adds what the run waits for, each with the method that reads or writes it."""
        os.set_blocking(self.stdin, False)
        selector.register(self.stdin, selectors.EVENT_WRITE, self._write)
        for name, descriptor in self.outputs.items():
            selector.register(descriptor, selectors.EVENT_READ, self._reader(name, descriptor))
        selector.register(self.server.control, selectors.EVENT_READ, self._read_report)

    def stop(self) -> None:
        """Asks the server to end the process, which may have ended."""
        if not self.report:
            with contextlib.suppress(OSError):
                self.server.control.send(b".")

    def close(self) -> None:
        """Closes the pipes."""
        for descriptor in (self.stdin, *self.outputs.values()):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def result(self) -> SandboxResult:
        """The outcome.

        Raises:
            SandboxError: the process could not be isolated.
        """
        if self.output["error"]:
            raise SandboxError(self.output["error"].decode(errors="replace"))
        ended = self.report["ended"]
        status = "ok" if self.report["code"] == 0 else "failed"
        if self.exceeded:
            status = "output"
        elif self.overslept:
            status = "sleep"
        elif ended in ("time", "wall"):
            status = str(ended)
        stdout, stderr = (self.output[name][: self.limits.output] for name in ("stdout", "stderr"))
        cpu_s = float(self.report["cpu_s"])
        texts = (stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        return SandboxResult(status, *texts, cpu_s, self.sleep_s)

    def _write(self) -> bool:
        try:
            self.unsent = self.unsent[os.write(self.stdin, self.unsent[:CHUNK]) :]
        except BrokenPipeError:
            self.unsent = self.unsent[:0]
        if self.unsent:
            return True
        os.close(self.stdin)
        self.stdin = -1
        return False

    def _reader(self, name: str, descriptor: int) -> Callable[[], bool]:
        def read() -> bool:
            chunk = os.read(descriptor, CHUNK)
            if not self.exceeded:
                self.output[name] += chunk
                if len(self.output[name]) > self.limits.output:
                    self.exceeded = True
                    self.stop()
            return bool(chunk)

        return read

    def _read_report(self) -> bool:
        try:
            message = self.server.control.recv(CHUNK)
        except ConnectionResetError:
            message = b""
        if not message:
            raise SandboxError("the sandbox's server ended during a run; see its output above")
        content = json.loads(message)
        if "ended" not in content:
            self.activity, self.told = content, content["told"]
            return True
        self.report = content
        self.at_end()
        return False


def _communicate(runs: list[_Run], wall_s: float) -> None:
    """Feeds and reads all runs until the servers have reported and the pipes are read.

    Raises:
        SandboxError: a server does not keep its own limits.
    """
    deadline = time.monotonic() + wall_s + START_S
    away = _Away(min(run.begun for run in runs))
    try:
        with selectors.DefaultSelector() as selector:
            for run in runs:
                run.register(selector)
            while selector.get_map():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise SandboxError(f"the sandbox's server gave no report within {wall_s + START_S:g} s")
                away.wait()
                for run in runs:
                    run.told = math.inf
                ready = selector.select(remaining)
                returned = time.monotonic()
                for key, _ in ready:
                    if not key.data():
                        selector.unregister(key.fileobj)
                away.woke(returned, min(run.told for run in runs))
                _end_sleepers(runs, away)
    finally:
        for run in runs:
            run.close()


class _Away:
    """Time in which this thread left its runs alone: it computed, or waited for a lock, a processor or the disk."""

    def __init__(self, since: float) -> None:
        self._worked_before_s = worked_s()
        self._seconds, self._since = 0.0, since  # without the time since it last woke
        self._wait = since, since  # the last one: begin and end

    def wait(self) -> None:
        """Begins a wait for the runs."""
        now = time.monotonic()
        self._seconds += now - self._since
        self._since = now

    def woke(self, now: float, told: float) -> None:
        """Ends a wait. The one before was over when the first message came that is taken only after this one."""
        begin, end = self._wait
        self._seconds += max(0.0, end - max(begin, told))
        self._wait, self._since = (self._since, now), now

    def seconds(self) -> float:
        """Seconds until now; at least those that the thread has worked or waited for a processor, also as it woke."""
        return max(self._seconds + time.monotonic() - self._since, worked_s() - self._worked_before_s)


def _end_sleepers(runs: list[_Run], away: _Away) -> None:
    """Ends runs that have slept longer than their limit of processor time.

    Without it they would end as "wall". One run of a pair sleeps while the other works, and both while this thread is
    `away` and has yet to feed or read them. So only time in which none of the three works or waits for a processor is
    sleep.
    """
    if any(run.report or run.activity.get("works", True) for run in runs):
        return
    working_s = sum(run.activity["working_s"] for run in runs) + away.seconds()
    sleep_s = min(run.activity["elapsed_s"] for run in runs) - working_s
    for run in runs:
        run.sleep_s = max(run.sleep_s, sleep_s)
        if sleep_s > run.limits.cpu_s and not run.overslept:
            run.overslept = True
            run.stop()
