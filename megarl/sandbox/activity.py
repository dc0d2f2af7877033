"""Tells a process that sleeps from one that waits for its turn on a busy machine. Standard library only."""

from __future__ import annotations

import contextlib
import os
import time

MAX_TASKS = 256  # threads that are read; a process with more is ended


def worked_s() -> float:
    """Seconds that this thread has worked or waited for a processor; 0 where /proc does not tell."""
    with contextlib.suppress(OSError), open("/proc/thread-self/schedstat") as file:
        return sum(int(field) for field in file.read().split()[:2]) / 1e9
    return 0.0


def waited_s(pid: int) -> float:
    """Seconds that the first thread of a process has waited for a processor; 0 where /proc does not tell."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


class Activity:
    """Threads of a process, and the time that it waits for a processor or the disk.

    It is read from /proc. Without that, or in a kernel without scheduler statistics, the process seems to work all the
    time.
    """

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}/task"
        self._waited_s: dict[str, float] = {}  # by thread; ended ones stay
        self._disk_s = 0.0
        self._looked = time.monotonic()
        self.works = True  # at the last look

    def look(self) -> int:
        """Reads the state of all threads; returns how many there are."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        try:
            tasks = os.listdir(self._folder)
        except OSError:
            self.works = True
            return 0
        states = [self._read(task) for task in tasks[:MAX_TASKS]]
        self.works = bool({"R", "D", ""} & set(states))
        if "D" in states:
            self._disk_s += since
        return len(tasks)

    def _read(self, task: str) -> str:
        """State of one thread, such as "S" for sleep; "" if it cannot be read."""
        with contextlib.suppress(OSError):
            with open(f"{self._folder}/{task}/schedstat") as file:
                self._waited_s[task] = int(file.read().split()[1]) / 1e9
            with open(f"{self._folder}/{task}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]  # a thread's name may hold anything
        return ""

    def summary(self, elapsed_s: float, cpu_s: float) -> dict[str, float | bool]:
        """Seconds since the start, seconds of work and of waiting for a turn, if it works now, and the time now."""
        working_s = cpu_s + sum(self._waited_s.values()) + self._disk_s
        return {"elapsed_s": elapsed_s, "working_s": working_s, "works": self.works, "told": time.monotonic()}
