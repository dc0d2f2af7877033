"""Timeline of a run: spans of every process and loads of every server, one line a step, and the trace made of them.

Each rank writes `RUN/timeline/rank_<n>.jsonl`. Rank 0's file also has the servers, as its client and its weight syncs
see them. Times are Unix seconds, so processes of machines with equal clocks line up.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

MAX_SPANS = 2000  # kept of a step; the rest are counted
MAX_LOADS = 400  # kept of a step and server; denser ones are thinned out
LEAST_GAP_S = 0.002  # between two loads of a server that are kept
MICROSECONDS = 1e6  # Chrome traces count in these


class Timeline:
    """Spans and loads of this process since the last `end_step`. Safe to use from threads and asyncio tasks.

    Nothing is kept before `open` and after `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._spans: list[tuple[str, str, float, float]] = []
        self._loads: dict[str, _Loads] = {}
        self._left_out = 0

    def open(self, path: Path) -> None:
        """Begins to record into the file `path`, after the lines that it has."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the time inside as `name`, in the lane of this thread, also when the block raises."""
        start = time.time()
        try:
            yield
        finally:
            thread = threading.current_thread()
            self.add(name, start, time.time(), "" if thread is threading.main_thread() else thread.name)

    def add(self, name: str, start: float, end: float, lane: str = "") -> None:
        """Records a span from `start` to `end`, Unix seconds. `lane` names a thread or server; "" the main thread."""
        if self._file is None:
            return
        with self._lock:
            if len(self._spans) < MAX_SPANS:
                self._spans.append((name, lane, start, end))
            else:
                self._left_out += 1

    def load(self, server: str, running: int) -> None:
        """Records that `server` has `running` completions under way from now on."""
        if self._file is not None:
            with self._lock:
                self._loads.setdefault(server, _Loads()).add(time.time(), running)

    def end_step(self, step: int) -> None:
        """Writes the line of `step`: all that was recorded since the line before."""
        with self._lock:
            spans, self._spans = self._spans, []
            left_out, self._left_out = self._left_out, 0
            loads = {server: entry.taken() for server, entry in self._loads.items()}
            if self._file is None:
                return
            line: dict[str, Any] = {
                "step": step,
                "spans": [[name, lane, round(start, 5), round(end, 5)] for name, lane, start, end in spans],
                "loads": loads,
            }
            if left_out:
                line["left_out"] = left_out
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self, step: int) -> None:
        """Writes what is left as a line of `step`, and ends the record. May be called twice."""
        if self._file is None:
            return
        if self._spans:
            self.end_step(step)
        with self._lock:
            self._file.close()
            self._file = None
            self._spans, self._loads, self._left_out = [], {}, 0


class _Loads:
    """Loads of one server over time: at most MAX_LOADS between two lines, evenly thinned out."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int]] = []
        self._every = 0.0  # least seconds between two entries

    def add(self, now: float, running: int) -> None:
        if len(self._entries) > 1 and now - self._entries[-2][0] < max(self._every, LEAST_GAP_S):
            self._entries[-1] = (now, running)
            return
        self._entries.append((now, running))
        if len(self._entries) > MAX_LOADS:
            self._every = 4 * (now - self._entries[0][0]) / MAX_LOADS
            self._entries = [*self._entries[:-1:2], self._entries[-1]]

    def taken(self) -> list[list[float]]:
        """The entries, which the next step continues from its last one."""
        entries, self._entries, self._every = self._entries, self._entries[-1:], 0.0
        return [[round(when, 3), running] for when, running in entries]


timeline = Timeline()


def trace_events(process: str, number: int, lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a process's events in Chrome's trace format, which Perfetto reads too.

    Source of the format: "Trace Event Format", the Chromium project. Spans of one lane that overlap without nesting go
    to rows of their own, as "X" events of one thread must nest.
    """
    yield {"name": "process_name", "ph": "M", "pid": number, "args": {"name": process}}
    threads: dict[tuple[str, int], int] = {}
    for line in lines:
        for name, lane, start, end, row in in_rows(line["spans"]):
            if (lane, row) not in threads:
                threads[lane, row] = len(threads)
                title = (lane or "main") + (f" ({row + 1})" if row else "")
                yield {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": number,
                    "tid": threads[lane, row],
                    "args": {"name": title},
                }
            yield {
                "name": name,
                "ph": "X",
                "pid": number,
                "tid": threads[lane, row],
                "ts": round(start * MICROSECONDS),
                "dur": round((end - start) * MICROSECONDS),
                "args": {"step": line["step"]},
            }
        for server, loads in line["loads"].items():
            for when, running in loads:
                yield {
                    "name": f"{server} completions under way",
                    "ph": "C",
                    "pid": number,
                    "ts": round(when * MICROSECONDS),
                    "args": {"running": running},
                }


def in_rows(spans: Iterable[tuple[str, str, float, float]]) -> list[tuple[str, str, float, float, int]]:
    """Spans with the row of their lane in which they nest with all others of it, ordered by start."""
    ordered = sorted(spans, key=lambda span: (span[2], -span[3]))
    open_ends: dict[str, list[list[float]]] = {}  # of each lane's rows: ends of the spans that are open
    placed = []
    for name, lane, start, end in ordered:
        rows = open_ends.setdefault(lane, [])
        for row in rows:
            while row and row[-1] <= start:
                row.pop()
        number = next((n for n, row in enumerate(rows) if not row or end <= row[-1]), len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(end)
        placed.append((name, lane, start, end, number))
    return placed
