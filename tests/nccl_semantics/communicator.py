"""One NCCL communicator as a thread with a queue, and the watchdog that ends a process whose operations hang.

A fake, because no GPU is at hand. See `nccl_over_gloo` and `process_group_nccl`, which build communicators over gloo.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

EXIT_STUCK = 134  # as after SIGABRT, by which torch's watchdog ends a process
POLL_S = 0.05
EXPLAIN_S = 10.0  # for the other ranks to report too, before the first one ends


class NcclError(RuntimeError):
    """An operation that NCCL would refuse, hang in or corrupt."""


@dataclass
class Pending:
    """An operation, or the building of a communicator, that has not ended."""

    what: str
    limit_s: float
    since: float = field(default_factory=time.monotonic)


class Work:
    """A queued operation. Waiting stops the host, where NCCL would only make the CUDA stream wait."""

    def __init__(self, what: str, run: Callable[[], None]) -> None:
        self.what, self.run = what, run
        self.error: BaseException | None = None
        self.done = threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        self.done.wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the operation. The first end counts."""
        if not self.done.is_set():
            self.error = error
            self.done.set()


class Watchdog:
    """Ends this process with a report if an operation pends for longer than its limit.

    With a `folder` the ranks leave their reports there, and the first one that ends waits for the other reports.
    """

    def __init__(self, rank: int, world_size: int = 1, folder: Path | None = None) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count()
        self._ending = False
        threading.Thread(target=self._watch, name="nccl-watchdog", daemon=True).start()

    @contextmanager
    def watching(self, what: str, limit_s: float) -> Iterator[None]:
        number = next(self._numbers)
        self._pending[number] = Pending(what, limit_s)
        yield
        if self._ending:
            threading.Event().wait()  # too late: the process ends
        del self._pending[number]  # after an error it stays: the other ranks may wait for this one

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            now = time.monotonic()
            stuck = [pending for pending in list(self._pending.values()) if now - pending.since > pending.limit_s]
            if stuck:
                self.end([f"{pending.what}, {now - pending.since:.1f} s" for pending in stuck])

    def end(self, lines: list[str]) -> None:
        """Reports the lines and the main thread's stack, and ends the process."""
        self._ending = True
        stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
        report = "".join([f"rank {self.rank} is stuck: {line}\n" for line in lines] + stack)
        print(report, file=sys.stderr, flush=True)
        if self.folder is not None:
            file = self.folder / f"rank_{self.rank}.stuck"
            file.with_suffix(".part").write_text(report)
            file.with_suffix(".part").rename(file)
            deadline = time.monotonic() + EXPLAIN_S
            while len(list(self.folder.glob("*.stuck"))) < self.world_size and time.monotonic() < deadline:
                time.sleep(POLL_S)
        os._exit(EXIT_STUCK)


class Communicator:
    """Runs its operations one after the other, in the order of issue, on a thread that stands for its CUDA stream."""

    def __init__(self, name: str, timeout_s: float, watchdog: Watchdog | None) -> None:
        self.name = name
        self._timeout_s, self._watchdog = timeout_s, watchdog
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._issued = itertools.count(1)
        threading.Thread(target=self._serve, name=f"nccl {name}", daemon=True).start()

    def submit(self, operation: str, run: Callable[[], None]) -> Work:
        work = Work(f"operation {next(self._issued)} of {self.name}: {operation}", run)
        self._queue.put(work)
        return work

    def close(self) -> None:
        self._queue.put(None)

    @torch.no_grad()
    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if self._watchdog is None:
                    work.run()
                else:
                    with self._watchdog.watching(work.what, self._timeout_s):
                        work.run()
            except Exception as error:
                work.end(NcclError(f"{work.what}: {error}"))
            else:
                work.end()
