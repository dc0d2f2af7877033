"""Says every few minutes of a long run how far it is and which tests run: one that stalls has a name before the end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

EVERY_S = 300.0
END_S = 4200.0  # above the limits of tests that are not long: none ends a process that is stopped


class RunningTests:
    """A plugin of the process that prints: it hears of every test's start and end, whichever process runs it.

    A test that runs for more than `end_s` ends the suite.
    """

    def __init__(self, end_s: float = END_S) -> None:
        self._end_s = end_s
        self._since: dict[str, float] = {}
        self._ended = 0
        self._start = time.monotonic()
        self._stop = threading.Event()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            threading.Thread(target=self._tell, args=(terminal,), name="running-tests", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._since[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._ended += self._since.pop(nodeid, None) is not None

    def pytest_unconfigure(self) -> None:
        self._stop.set()

    def _tell(self, terminal: pytest.TerminalReporter) -> None:
        while not self._stop.wait(EVERY_S):
            terminal.write_line(self.line())
            if self._longest_s() > self._end_s:
                terminal.write_line(
                    f"a test runs for more than {self._end_s:g} s, and no limit ends it: the suite ends"
                )
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: processes that share the tests are killed
                return

    def line(self) -> str:
        """`[15 min] 2100 tests ended; running: tests/a.py::test_b (12 s), ...`, the one that runs longest first.

        If one has run for that long, `; processes: 301 sleeping in futex_do_wait, 302 stopped in do_signal_stop`
        follows: a process that is stopped, or waits for a disk, cannot say where it is.
        """
        now = time.monotonic()
        running = sorted(self._since.copy().items(), key=lambda test: test[1])
        named = ", ".join(f"{nodeid} ({now - since:.0f} s)" for nodeid, since in running)
        states = f"; processes: {', '.join(_states())}" if self._longest_s() >= EVERY_S else ""
        return f"[{(now - self._start) / 60:.0f} min] {self._ended} tests ended; running: {named or 'none'}{states}"

    def _longest_s(self) -> float:
        """For how long the test that runs longest has run; 0 if none runs."""
        now = time.monotonic()
        return now - min(self._since.copy().values(), default=now)


def _states() -> list[str]:
    """The processes that share the tests, what each does, and where in the kernel its main thread waits."""
    states = []
    for process in [psutil.Process(), *psutil.Process().children()]:
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            place = Path(f"/proc/{process.pid}/wchan").read_text()
            states.append(f"{process.pid} {process.status()} in {place if place != '0' else 'no wait'}")
    return states
