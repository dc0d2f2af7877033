"""The processes of `RewardPool`: one that holds the reward functions, and forks a worker for every request.

Started as `python -m megarl.rewards.worker FD MEMORY_BYTES`; FD is a Unix socket. The first message on it is the
pickled reward functions (they come from the parent, which may hand over any code of its own). Every later message
carries one end of a socket pair; a worker is forked on it and its pid answered. A worker reads shares of pickled calls
from the parent and answers JSON, so that nothing of what a call returns is ever unpickled.
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
SHARE_S = 0.02  # well below `pool.PATIENCE_S`, after which the parent gives what is left of a share to others


def receive(connection: socket.socket) -> bytes | None:
    """The next message, or None where the other side has gone."""
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
    """One message, with its length before it."""
    connection.sendall(HEADER.pack(len(message)) + message)


def score(functions: list[Any], call: dict[str, Any]) -> list[float]:
    """The value of every function for one completion. Raises what a function raises, and TypeError for no number."""
    values = []
    for function in functions:
        value = function(*call["args"], **call["data"])
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        if isinstance(value, str) or not math.isfinite(number := float(value)):
            raise TypeError(f"{getattr(function, '__name__', function)} returned {value!r}, which is no finite number")
        values.append(number)
    return values


async def _awaited(value: Any) -> Any:
    return await value


def serve(connection: socket.socket, functions: list[Any]) -> None:
    """Answers shares of calls until the parent hangs up, call by call. A share ends after SHARE_S: others go on."""
    while (message := receive(connection)) is not None:
        calls: list[bytes] = pickle.loads(message)
        until = time.monotonic() + SHARE_S
        for number, call in enumerate(calls, 1):
            try:
                answer: dict[str, Any] = {"values": score(functions, pickle.loads(call))}
            except (Exception, SystemExit) as error:  # the sample's fate, told to the parent; the worker goes on
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            answer["more"] = number < len(calls) and time.monotonic() < until
            send(connection, json.dumps(answer).encode())
            if not answer["more"]:
                break


def main() -> None:
    logging.disable(logging.WARNING)  # of math-verify, whose own time limits are off: the pool has them
    control = socket.socket(fileno=int(sys.argv[1]))
    memory = int(sys.argv[2])
    die_with_parent(os.getppid())
    # Ctrl-C, and the SIGTERM that Slurm sends to all processes of a job, are the trainer's business: it finishes its
    # step first, and still needs rewards. A handler, as what a reward starts would inherit it if they were ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are reaped by the kernel
    message = receive(control)
    if message is None:
        return
    try:
        path, pickled = pickle.loads(message)
        sys.path[:] = path
        functions = pickle.loads(pickled)
    except Exception as error:  # told to the parent, which raises it
        send(control, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    send(control, json.dumps({"pid": os.getpid()}).encode())
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        me = os.getpid()
        pid = os.fork()
        if pid:
            os.close(descriptors[0])
            send(control, json.dumps({"pid": pid}).encode())
            continue
        control.close()
        die_with_parent(me)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a reward may start processes and wait for them
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            serve(socket.socket(fileno=descriptors[0]), functions)
        os._exit(0)


if __name__ == "__main__":
    main()
