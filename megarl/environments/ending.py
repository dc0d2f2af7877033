"""The end of environments' processes: each closes its environment by a deadline, then it is killed with its group."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import tempfile
import time
from collections.abc import Sequence

import psutil

from megarl.environments.host import END
from megarl.forks import kill_group
from megarl.knobs import visible

logger = logging.getLogger(__name__)


class Ends:
    """Ends processes of the environment `kind`, which have `limit_s` seconds to close it.

    A `close` that fails or takes too long is named once, in a warning, and costs nothing else. May be used by threads.
    """

    def __init__(self, kind: str, limit_s: float) -> None:
        self._kind = kind
        self._limit_s = limit_s
        self._named: set[str] = set()
        self._failures = tempfile.NamedTemporaryFile("r", prefix="megarl-close-", encoding="utf-8")  # noqa: SIM115

    @property
    def failures(self) -> str:
        """The file where a process writes down that its `close` failed."""
        return self._failures.name

    def all_of(self, pids: Sequence[int]) -> None:
        """Ends processes, and all that they started, side by side."""
        running, started = {}, []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                started += psutil.Process(pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                running[os.pidfd_open(pid)] = pid
        try:
            self._wait(list(running))
        finally:
            for descriptor in running:
                os.close(descriptor)
            for pid in pids:
                kill_group(pid)
            for process in started:  # also those that have left its group
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for line in self._failures.read().splitlines():
            self._name(f"failed, {visible(line)}")

    def _wait(self, running: Sequence[int]) -> None:
        """Asks the processes behind the pidfds `running` to end, and waits until the deadline."""
        poll, left, end = select.poll(), len(running), time.monotonic() + self._limit_s
        for descriptor in running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, END)
            poll.register(descriptor, select.POLLIN)
        while left and (remaining_s := end - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(remaining_s * 1000):
                poll.unregister(descriptor)
                left -= 1
        if left:
            self._name(f"took longer than rollout.environment.close_limit_s={self._limit_s:g}")

    def _name(self, failure: str) -> None:
        if failure not in self._named:
            self._named.add(failure)
            logger.warning("the environment %s: close() %s; its process is ended", self._kind, failure)

    def close(self) -> None:
        """Removes the file of failures."""
        self._failures.close()
