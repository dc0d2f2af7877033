"""Waits for the processes of a run, and ends them together when one of them fails.

Launchers pass their processes as `Task`s, so that runs end alike under all launchers.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from megarl.observe.log_tail import log_tail
from megarl.parallel.rendezvous import ENDED, publish
from megarl.parallel.watchdog import BEAT_S, Monitor

STOP_DEADLINE_S = 60.0  # for the other ranks, once one has ended with 0: they leave together
FAILURE_GRACE_S = 15.0  # for the other ranks to clean up, once one has failed
SERVER_GRACE_S = 20.0  # for the servers, once the ranks have ended
LOG_TAIL_LINES = 15


class Task(Protocol):
    """One process of a run."""

    name: str  # such as "rank 1"
    log: Path | None  # None: writes to this terminal

    def poll(self) -> int | None:
        """Exit code, a signal's number if negative; None while it runs."""

    def lost(self) -> str:
        """Reason if the process is lost without an exit code, else ""."""

    def send_signal(self, number: int) -> None:
        """Sends it a signal."""

    def kill(self) -> None:
        """Sends SIGKILL and waits for its end, with a deadline."""


class _Failure(NamedTuple):
    """A process's failure, in one line. The smallest of several is the cause of the others."""

    broken: bool  # its collective failed, as it does when another rank ends; with NCCL it mostly hangs instead
    late: bool  # it was seen after others had failed
    in_terminal: bool  # it has told its failure on this terminal
    number: int  # of the process: ranks, then servers
    line: str


def watch(
    ranks: Sequence[Task],
    servers: Sequence[Task],
    monitor: Monitor,
    folder: Path | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    every_s: float = 0.05,
) -> int:
    """Waits until all ranks have ended, then ends the servers. Returns 0, or the exit code of one that failed.

    The code of a process that signal N ended is 128 + N, as in a shell.

    Ctrl-C and SIGTERM are passed to rank 0, which stops the run in order. A rank or server that fails is printed with
    its stage, its last collective and the end of its log. The other ranks get FAILURE_GRACE_S seconds, then SIGKILL.
    If a rank is stuck (see `Monitor`), all get SIGKILL at once. In the job's `folder` the servers learn that the ranks
    have ended. `meanwhile` is called between polls. The first failure is printed again at the end, below all that the
    other processes said about it.
    """
    failures: list[_Failure] = []
    with _passed_on(ranks[0]):
        try:
            return _wait(ranks, servers, monitor, meanwhile, every_s, failures)
        finally:
            try:
                _end(ranks, servers, folder)
            finally:
                meanwhile()
                if not all(failure.in_terminal for failure in failures):
                    print(f"megarl: the run ended because {min(failures).line}", file=sys.stderr)


def _wait(
    ranks: Sequence[Task],
    servers: Sequence[Task],
    monitor: Monitor,
    meanwhile: Callable[[], None],
    every_s: float,
    failures: list[_Failure],
) -> int:
    """Polls until all ranks have ended or must be ended. Appends to `failures`, and prints them."""
    deadline, last_check = None, time.monotonic()
    while True:
        rank_codes, server_codes = [task.poll() for task in ranks], [task.poll() for task in servers]
        meanwhile()
        ended = any(code is not None for code in (*rank_codes, *server_codes))
        now = time.monotonic()
        if ended and deadline is None:
            failed = any(rank_codes) or any(code is not None for code in server_codes)
            deadline = now + (FAILURE_GRACE_S if failed else STOP_DEADLINE_S)
            failures += _report(ranks, servers, monitor, failures) if failed else []
        if None not in rank_codes or (deadline is not None and now > deadline):
            code = next((code for code in (*rank_codes, *server_codes) if code), int(None in rank_codes))
            if code:
                failures += _report(ranks, servers, monitor, failures)  # the cause may end after what it broke
            if code and not failures:
                failures += _report_late(ranks, monitor)
            return code if code >= 0 else 128 - code
        if deadline is None and now > last_check + BEAT_S:
            last_check, stuck = now, monitor.check()
            if stuck:
                print(f"megarl: {stuck}; ended all ranks", file=sys.stderr)
                failures.append(_Failure(False, False, False, 0, stuck))
                return 1
        time.sleep(every_s)


def _end(ranks: Sequence[Task], servers: Sequence[Task], folder: Path | None) -> None:
    """Kills ranks that still run. Tells the servers to end, and kills those that do not."""
    for task in ranks:
        _kill(task)
    if folder is not None and servers:
        try:
            publish(folder, ENDED, "")
        except OSError as error:  # such as a full disk; they are killed after the same time
            print(f"megarl: the servers cannot be told of the end: {error}", file=sys.stderr)
    deadline = time.monotonic() + SERVER_GRACE_S
    while any(task.poll() is None for task in servers) and time.monotonic() < deadline:
        time.sleep(0.05)
    for task in servers:
        _kill(task)


def _kill(task: Task) -> None:
    if task.poll() is None:
        task.kill()
    if task.poll() is None:
        print(f"megarl: {task.name} does not end after SIGKILL: a driver or a file system holds it", file=sys.stderr)


def _report(
    ranks: Sequence[Task], servers: Sequence[Task], monitor: Monitor, known: Sequence[_Failure]
) -> list[_Failure]:
    """Returns the failures that are not `known`. Prints their last stage and the end of their logs.

    A rank that writes to this terminal has told its failure there, unless a signal killed it, and is not printed.
    Ranks that a known failure broke are left out.
    """
    failures, has_cause = [], not all(failure.broken for failure in known)
    for number, task in enumerate([*ranks, *servers]):
        code, is_rank = task.poll(), number < len(ranks)
        if code is None or (is_rank and code == 0) or number in [failure.number for failure in known]:
            continue
        line = f"{task.name} {task.lost() or how_it_ended(code)}"
        if is_rank:
            line += f" {monitor.describe(number)}"
        broken = is_rank and monitor.collective_failed(number)
        if broken and has_cause:
            continue
        if is_rank and task.log is None and code > 0 and not task.lost():
            failures.append(_Failure(broken, bool(known), True, number, f"{line}; what it said stands above"))
            continue
        shown, said = line, ""
        if task.log is not None and task.log.exists():
            tail = log_tail(task.log, LOG_TAIL_LINES)
            said = f": {tail[-1].removeprefix('megarl: ')}" if tail and code > 0 else ""
            shown = f"{line}; its log {task.log} ends:\n" + "\n".join("  " + text for text in tail)
        print(f"megarl: {shown}", file=sys.stderr)
        failures.append(_Failure(broken, bool(known), False, number, line + said))
    return failures


def _report_late(ranks: Sequence[Task], monitor: Monitor) -> list[_Failure]:
    """Returns and prints the ranks that still run STOP_DEADLINE_S after another one has ended."""
    failures = []
    for number, task in enumerate(ranks):
        if task.poll() is None:
            where = monitor.describe(number)
            line = f"{task.name} still ran {STOP_DEADLINE_S:g} s after another rank had ended, {where}"
            print(f"megarl: {line}", file=sys.stderr)
            failures.append(_Failure(False, False, False, number, line))
    return failures


def how_it_ended(code: int) -> str:
    """Describes an exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextlib.contextmanager
def _passed_on(task: Task) -> Iterator[None]:
    """Forwards SIGTERM and SIGINT to `task`."""
    previous = {
        number: signal.signal(number, lambda received, _: task.send_signal(received))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
