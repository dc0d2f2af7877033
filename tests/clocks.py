"""Clocks that tests put forward: a limit passes by an event, however late a busy machine is."""

from __future__ import annotations

import sys
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable
from typing import Any


def put_forward(loop: AbstractEventLoop, seconds: float) -> None:
    """Puts the clock of an asyncio loop forward: what has waited there for so long is out of time. From any thread."""
    clocked: Any = loop
    if not hasattr(loop, "ahead"):
        clocked.ahead, clocked.own_time = 0.0, loop.time
        clocked.time = lambda: clocked.own_time() + clocked.ahead
    clocked.ahead += seconds
    loop.call_soon_threadsafe(lambda: None)  # it looks at its timers now


class Stalls:
    """Clocks of a process that stops where it reads them, as on a machine that has no time for it.

    A line of megarl or of its tests that reads `time.monotonic` or `time.perf_counter` sleeps `seconds` first, TIMES
    times in each test. Busy processes beside the tests stop any line, but few of them. Lines that read no clock, and
    other processes, do not stop.
    """

    TIMES = 2

    def __init__(self, seconds: float) -> None:
        self.seconds, self._reads = seconds, Counter[tuple[str, int]]()
        for name in ("monotonic", "perf_counter"):
            setattr(time, name, self._late(getattr(time, name)))

    def begin_test(self) -> None:
        self._reads.clear()

    def _late(self, clock: Callable[[], float]) -> Callable[[], float]:
        sleep = time.sleep

        def read() -> float:
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__", "").partition(".")[0] in ("megarl", "tests"):
                line = caller.f_code.co_filename, caller.f_lineno
                self._reads[line] += 1
                if self._reads[line] <= self.TIMES:
                    sleep(self.seconds)
            return clock()

        return read
