"""Waits for the processes of a run, wherever they run, and ends them together when one of them fails.

A launcher hands in its processes as `Task`s; what happens when is the same under all of them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from megarl.parallel.rendezvous import ENDED, publish
from megarl.parallel.watchdog import BEAT_S, Monitor

STOP_DEADLINE_S = 60.0  # for the other ranks, once one has ended well: they leave together
FAILURE_GRACE_S = 15.0  # for the other ranks to clean up, once one has failed
SERVER_GRACE_S = 20.0  # for the servers, once the ranks have ended
LOG_TAIL_LINES = 15


class Task(Protocol):
    """One process of a run."""

    name: str  # such as "rank 1"
    log: Path | None  # None: it writes to this terminal

    def poll(self) -> int | None:
        """Its exit code, negative a signal's number; None while it runs."""

    def lost(self) -> str:
        """Why nobody can say any more how it ended; "" while somebody can."""

    def send_signal(self, number: int) -> None:
        """Sends it a signal."""

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""


def watch(
    ranks: Sequence[Task],
    servers: Sequence[Task],
    monitor: Monitor,
    folder: Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    every_s: float = 0.05,
) -> int:
    """Waits until all ranks have ended, then ends the servers. Returns 0, or the exit code of one that failed.

    Ctrl-C and SIGTERM are passed to rank 0, which stops the run in order. When a rank or a server fails, it is named,
    with its stage, its last collective and the end of its log, and the other ranks get FAILURE_GRACE_S seconds, then
    SIGKILL. When a rank is stuck (see `Monitor`), all get SIGKILL at once. `folder` is the job's, where the servers
    are told that the ranks have ended. `meanwhile` is called between looks.
    """
    try:
        with _passed_on(ranks[0]):
            return _wait(ranks, servers, monitor, meanwhile, every_s)
    finally:
        _end(ranks, servers, folder)
        meanwhile()


def _wait(
    ranks: Sequence[Task], servers: Sequence[Task], monitor: Monitor, meanwhile: Callable[[], None], every_s: float
) -> int:
    deadline, looked = None, time.monotonic()
    while True:
        codes, gone = [task.poll() for task in ranks], [task.poll() for task in servers]
        meanwhile()
        ended = any(code is not None for code in (*codes, *gone))
        now, stuck = time.monotonic(), None
        if ended and deadline is None:
            failed = any(codes) or any(code is not None for code in gone)
            deadline = now + (FAILURE_GRACE_S if failed else STOP_DEADLINE_S)
            _report(ranks, servers, monitor)
        if None not in codes:
            return next((code for code in (*codes, *gone) if code), 0)
        if deadline is None and now > looked + BEAT_S:
            looked, stuck = now, monitor.check()
        if stuck or (deadline is not None and now > deadline):
            if stuck:
                print(f"megarl: {stuck}; ended all ranks", file=sys.stderr)
            return next((code for code in (*codes, *gone) if code), 1)
        time.sleep(every_s)


def _end(ranks: Sequence[Task], servers: Sequence[Task], folder: Path | None) -> None:
    """Ranks that still run are killed; servers end by themselves, told by the job's folder, or are killed too."""
    for task in ranks:
        if task.poll() is None:
            task.kill()
    if folder is not None and servers:
        publish(folder, ENDED, "")
    deadline = time.monotonic() + SERVER_GRACE_S
    while any(task.poll() is None for task in servers) and time.monotonic() < deadline:
        time.sleep(0.05)
    for task in servers:
        if task.poll() is None:
            task.kill()


def _report(ranks: Sequence[Task], servers: Sequence[Task], monitor: Monitor) -> None:
    """Shows who failed, where it was, and the end of its log; a rank that writes to this terminal speaks for itself
    unless a signal killed it."""
    for number, task in enumerate([*ranks, *servers]):
        code, is_rank = task.poll(), number < len(ranks)
        if code is None or (is_rank and (code == 0 or (task.log is None and code > 0))):
            continue
        line = f"megarl: {task.name} {task.lost() or how_it_ended(code)}"
        if is_rank:
            line += f" {monitor.describe(number)}"
        if task.log is not None and task.log.exists():
            tail = task.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            line += f"; its log {task.log} ends:\n" + "\n".join("  " + text for text in tail)
        print(line, file=sys.stderr)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextlib.contextmanager
def _passed_on(task: Task) -> Iterator[None]:
    """Passes SIGTERM and SIGINT on to `task`."""
    previous = {
        number: signal.signal(number, lambda received, _: task.send_signal(received))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
