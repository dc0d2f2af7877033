"""Forks isolated processes for `megarl.sandbox.client`, one at a time. Standard library only.

Started as `python -I -S`, so that it holds nothing but the standard library: no environment, no keys, no data of the
trainer. It never sees code, input or output: those go through pipes between the client and the isolated process. A fork
of a started Python takes a few milliseconds, a new Python five times that.

    client --request, pipes--> server --fork--> isolated process
    client <-----report------- server <-exit--

The server ends with its client: the control socket closes then, which also ends the process under way. Twenty times a
second it looks at how many threads the process has, and how long it worked. The client hears the latter.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from typing import Any

from megarl.sandbox import judge
from megarl.sandbox.activity import Activity
from megarl.sandbox.isolation import MAX_THREADS, Features, isolate

MAX_REQUEST = 4096
STOP = b"."  # message of the client: end the process under way
PRELOADED = (  # what programs import most: read once, before the fork
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq",
    "itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string", "threading", "traceback",
    "typing",
)  # fmt: skip
ERROR_FD, CHANNEL_IN, CHANNEL_OUT = 3, 4, 5
CHECK_S = 0.005  # least time between two looks at the processor time
LOOK_S = 0.05  # time between two looks at threads and sleep
TELL_S = 0.25  # time between two messages about sleep
REMOVE_S = 60.0
TRACEBACK = 50  # last calls that are printed


def main() -> None:
    control, folders = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM):  # the client decides; a job's signals go to all its processes
        signal.signal(number, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # the forks share these objects
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST, 8)
        if not message:
            return
        if message == STOP:  # the process that it was meant for had just ended
            continue
        request = json.loads(message)
        folder = tempfile.mkdtemp(prefix="megarl-sandbox-", dir=folders)
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_isolated(request, folder, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        report = _supervise(pid, control, request["cpu_limit_s"], request["wall_limit_s"])
        _remove(folder)
        try:
            control.send(json.dumps(report).encode())
        except BrokenPipeError:
            return


def _supervise(pid: int, control: socket.socket, cpu_limit_s: float, wall_limit_s: float) -> dict[str, Any]:
    """Waits for the process, ends it at a limit or at the client's word, and reports how it ended.

    Processor time is the process's own, threads included. It passes at most once a core. The kernel does not count
    threads for root, nor without a user namespace, so they are counted here.
    """
    clock = (~pid << 3) | 2  # the CPU clock of a process, see clock_getcpuclockid(3)
    cores = os.cpu_count() or 1
    start = told = time.monotonic()
    wall_end = start + wall_limit_s
    activity = Activity(pid)
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(control, select.POLLIN)
    stopped = ""
    while not stopped:
        cpu_s, now = time.clock_gettime(clock), time.monotonic()
        cpu_left, wall_left = cpu_limit_s - cpu_s, wall_end - now
        if cpu_left <= 0 or wall_left <= 0:
            stopped = "time" if cpu_left <= 0 else "wall"
            break
        look_s = min(wall_left, LOOK_S, max(cpu_left / cores, CHECK_S))
        ready = [descriptor for descriptor, _ in poll.poll(1000 * look_s)]
        if pidfd in ready:
            break
        if ready:  # the client asks for the end, or has ended
            control.recv(1)
            stopped = "stopped"
        elif activity.look() > MAX_THREADS:
            stopped = "threads"
        elif now - told >= TELL_S:
            told = now
            with contextlib.suppress(BrokenPipeError):  # the client has ended, which `poll` tells next
                control.send(json.dumps(activity.summary(now - start, cpu_s)).encode())
    if stopped:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so it is no other process
    os.close(pidfd)
    _, status, usage = os.wait4(pid, 0)
    cpu = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status) and cpu >= cpu_limit_s:  # the kernel's own limit came first
        stopped = "time"
    elif stopped == "wall" and os.WIFEXITED(status):  # it had ended before this process came to look
        stopped = ""
    return {"ended": stopped or "exit", "code": os.waitstatus_to_exitcode(status), "cpu_s": cpu}


def _remove(folder: str) -> None:
    """Removes a folder. With files in memory it is empty; else a program may have made it deep or unreadable."""
    try:
        os.rmdir(folder)
    except OSError:
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):  # neither follows a link inside
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, timeout=REMOVE_S, check=False)


def _become_isolated(request: dict[str, Any], folder: str, descriptors: list[int]) -> None:
    """Takes the client's pipes, isolates this process and runs what comes on stdin. Ends the process.

    An error before the code runs goes to a pipe of its own, which is closed before the first line of the code.
    """
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in descriptors]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.closerange(len(high), max(high) + 1)
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(HOME=folder, TMPDIR=folder, LANG="C.UTF-8")
        source = _read(request["code_bytes"])
        isolate(folder, request["memory"], int(request["cpu_limit_s"]) + 2, Features(**request["features"]))
    except BaseException as error:
        os.write(ERROR_FD, f"{error}".encode())
        os._exit(1)
    os.close(ERROR_FD)
    if request["judge"]:
        statement = source.decode(errors="surrogatepass")
        _finish(lambda: judge.judge(statement, judge.Channel(CHANNEL_IN, CHANNEL_OUT, judges=True)))
    serves = len(descriptors) > CHANNEL_IN
    _finish(lambda: _run_program(source, serves))


def _read(size: int) -> bytes:
    """Reads from stdin past Python's buffer, so that a program finds all of its input by `open(0)` too."""
    parts = []
    while size > 0 and (part := os.read(0, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _run_program(source: bytes, serves: bool) -> None:
    """Runs the program as `__main__`; then answers the judge if there is one."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["<code>"]
    sys.path.insert(0, "")
    program = compile(source.decode(), "<code>", "exec")
    exec(program, module.__dict__)  # isolated by now; running this code is the purpose of the process
    if serves:
        judge.serve(judge.Channel(CHANNEL_IN, CHANNEL_OUT, judges=False), module.__dict__)


def _finish(run: Any) -> None:
    """Runs a function, then ends the process as Python ends: threads, exit functions, buffers, the exit code."""
    import atexit
    import threading
    import traceback

    code: Any = 0
    try:
        run()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc(limit=-TRACEBACK)
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as Python does when the buffer cannot be written
    os._exit((code or 0) & 0xFF)
