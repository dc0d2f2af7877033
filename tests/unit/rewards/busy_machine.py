"""A machine with more to do than it has cores."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def loops_beside(per_core: int) -> Iterator[None]:
    """Runs so many endless loops for each core."""
    loop = ["sh", "-c", "while :; do :; done"]
    loops = [os.posix_spawn("/bin/sh", loop, os.environ) for _ in range(per_core * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for pid in loops:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
