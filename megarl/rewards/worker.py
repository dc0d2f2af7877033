"""Processes of `RewardPool`: one holds the reward functions and forks a worker on every request.

Started as `python -m megarl.rewards.worker FD MEMORY_BYTES`, where FD is a Unix socket. The first message on it holds
the pickled reward functions. Unpickling them is safe, as they come from the parent. Every later message carries one end
of a socket pair: the process forks a worker on it and answers the worker's pid. A worker reads shares of pickled calls
from the parent and answers in JSON, as a function's return value must not be unpickled in the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import logging
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from typing import Any

from megarl.processes import die_with_parent

HEADER = struct.Struct("!Q")
SHARE_S = 0.02  # well below `pool.PATIENCE_S`, after which the parent gives the rest of a share to other workers


class FunctionError(Exception):
    """A reward function failed. Names it and the cause."""


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


def score(functions: list[Any], call: dict[str, Any]) -> list[float]:
    """Scores one completion with every function.

    Raises:
        FunctionError: a function raised, or returned no finite number. Names the function and the cause.
    """
    values = []
    for function in functions:
        try:
            value = function(*call["args"], **call["data"])
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            if isinstance(value, str) or not math.isfinite(number := float(value)):
                raise TypeError(f"it returned {value!r}, not a finite number")
        except (Exception, SystemExit) as error:
            raise FunctionError(f"{_name(function)} failed, {type(error).__name__}: {error}"[:500]) from error
        values.append(number)
    return values


def _name(function: Any) -> str:
    """`MODULE.FUNCTION`, also of a partial function."""
    function = getattr(function, "func", function)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}.{name}".removeprefix("megarl.rewards.")


async def _awaited(value: Any) -> Any:
    return await value


def serve(connection: socket.socket, functions: list[Any]) -> None:
    """Answers shares of calls, call by call, until the parent closes. After SHARE_S, the rest of a share goes back."""
    while (message := receive(connection)) is not None:
        calls: list[bytes] = pickle.loads(message)
        share_end = time.monotonic() + SHARE_S
        for number, call in enumerate(calls, 1):
            try:
                answer: dict[str, Any] = {"values": score(functions, pickle.loads(call))}
            except FunctionError as error:  # fails only this sample; the worker goes on
                answer = {"error": str(error)}
            answer["more"] = number < len(calls) and time.monotonic() < share_end
            send(connection, json.dumps(answer).encode())
            if not answer["more"]:
                break


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns that its time limits are off; the pool has its own
    control = socket.socket(fileno=int(sys.argv[1]))
    memory = int(sys.argv[2])
    die_with_parent(os.getppid())
    # On Ctrl-C, or on the SIGTERM that Slurm sends to all processes of a job, the trainer finishes its step and still
    # needs rewards. Use a handler instead of SIG_IGN, which processes started by a reward would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    message = receive(control)
    if message is None:
        return
    try:
        path, pickled = pickle.loads(message)
        sys.path[:] = path
        functions = pickle.loads(pickled)
        for module in {getattr(getattr(function, "func", function), "__module__", "") for function in functions}:
            getattr(sys.modules.get(module), "before_fork", lambda: None)()  # slow imports, once for all workers
    except Exception as error:  # the parent raises it
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
            send(control, json.dumps({"pid": pid}).encode())
            continue
        control.close()
        die_with_parent(server_pid)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a reward may start processes and wait for them
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            serve(socket.socket(fileno=descriptors[0]), functions)
        os._exit(0)


if __name__ == "__main__":
    main()
