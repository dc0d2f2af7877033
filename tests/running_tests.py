"""Says every few minutes of a long run how far it is and which tests run: one that stalls has a name before the end."""

from __future__ import annotations

import contextlib
import threading
import time

import psutil
import pytest

EVERY_S = 300.0


class RunningTests:
    """A plugin of the process that prints: it hears of every test's start and end, whichever process runs it."""

    def __init__(self) -> None:
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

    def line(self) -> str:
        """`[15 min] 2100 tests ended; running: tests/a.py::test_b (12 s), ...`, the one that runs longest first.

        If one has run for that long, `; processes: 301 sleeping, 302 stopped` follows: a process that is stopped, or
        waits for a disk, cannot say where it is.
        """
        now = time.monotonic()
        running = sorted(self._since.copy().items(), key=lambda test: test[1])
        named = ", ".join(f"{nodeid} ({now - since:.0f} s)" for nodeid, since in running)
        long = bool(running) and now - running[0][1] >= EVERY_S
        states = f"; processes: {', '.join(_states())}" if long else ""
        return f"[{(now - self._start) / 60:.0f} min] {self._ended} tests ended; running: {named or 'none'}{states}"


def _states() -> list[str]:
    """The processes that share the tests, and what each does: `302 sleeping`."""
    states = []
    for process in [psutil.Process(), *psutil.Process().children()]:
        with contextlib.suppress(psutil.Error):  # it has ended
            states.append(f"{process.pid} {process.status()}")
    return states
