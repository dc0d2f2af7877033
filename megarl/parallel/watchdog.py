"""Where every rank is, kept outside the rank, so that one that died or hangs can be named.

A rank keeps one small record in a memory-mapped file: the stage it is in and the last collective it joined. Writing
it costs about a microsecond, and it outlives the process. `Monitor` reads the records of all ranks, in the local
launcher or, where there is none, in ranks 0 and 1. Imports no torch at the top: the launcher reads this module.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WATCH = "MEGARL_WATCH"  # folder of the records, from the local launcher to its ranks
BEAT_S = 0.5
GUARD_EVERY = 10  # beats between looks of ranks that watch each other over a network file system, which must see them
FROZEN_S = 60.0  # a process that has not run for so long is stopped or starved
FROZEN_PART = 0.8  # of parallel.timeout_s, if that is sooner: what does not run makes no progress either
GRACE_S = 30.0  # collectives themselves fail so long after parallel.timeout_s: the monitor speaks first
EXIT_STUCK = 70  # EX_SOFTWARE
SHOWN = 4  # ranks described in one line

COMPUTES, WAITS, FAILED = range(3)
_RECORD = struct.Struct("<qqqq48s104s")  # beats, changes, state, collectives joined, stage, last collective
_BEATS = struct.Struct("<q")

# torch.distributed's calls reach the process group by these names.
_METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.watch"


class _Recorder:
    """This rank's record."""

    def __init__(self, folder: Path, rank: int) -> None:
        with open(_file(folder, rank), "w+b") as file:
            file.truncate(_RECORD.size)
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self.beats = self.changes = self.joined = 0
        self.state, self.stage, self.collective = COMPUTES, "start", ""

    def beat(self) -> None:
        self.beats += 1
        _BEATS.pack_into(self._map, 0, self.beats)

    def show(self) -> None:
        """Has a network file system bring the record to the other machines."""
        self._map.flush()

    def write(self) -> None:
        self.changes += 1
        text = self.stage.encode()[:48], self.collective.encode()[:104]
        _RECORD.pack_into(self._map, 0, self.beats, self.changes, self.state, self.joined, *text)

    def join(self, collective: str) -> None:
        self.joined += 1
        self.state, self.collective = COMPUTES, collective
        self.write()

    def turn(self, state: int) -> None:
        self.state = state
        self.write()


_recorder: _Recorder | None = None


def start(folder: Path, rank: int, world_size: int, timeout_s: float, *, guard: bool) -> None:
    """Begins this rank's record in `folder`, which all ranks see; once a process.

    With `guard`, ranks 0 and 1 watch all ranks and end themselves with EXIT_STUCK and one line when one is stuck; a
    launcher that watches from outside needs none.
    """
    global _recorder
    if _recorder is not None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _recorder = _Recorder(folder, rank)
    _recorder.write()
    _record_collectives(_recorder)
    monitor = Monitor(folder, world_size, timeout_s, BEAT_S * GUARD_EVERY) if guard and rank < 2 else None
    threading.Thread(target=_beat, args=(_recorder, guard, monitor), name="megarl-watchdog", daemon=True).start()


def _beat(recorder: _Recorder, guard: bool, monitor: Monitor | None) -> None:
    while True:
        recorder.beat()
        looks = guard and recorder.beats % GUARD_EVERY == 0
        if looks:
            recorder.show()
        if looks and monitor is not None and (problem := monitor.check()):
            print(f"megarl: {problem}", file=sys.stderr, flush=True)
            os._exit(EXIT_STUCK)  # the main thread may be inside a collective that nothing interrupts
        time.sleep(BEAT_S)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Names what the rank is doing, for the record."""
    if (recorder := _recorder) is None:
        yield
        return
    before, recorder.stage = recorder.stage, name
    recorder.write()
    yield  # an error keeps its stage in the record
    recorder.stage = before
    recorder.write()


def _record_collectives(recorder: _Recorder) -> None:
    """Every collective of this process is recorded as it is joined, waited for and done."""
    import torch.distributed as dist

    labels: dict[str, str] = {}

    def label(group: Any) -> str:
        if group.group_name not in labels:
            ranks = dist.get_process_group_ranks(group)
            shown = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > SHOWN else f"ranks {', '.join(map(str, ranks))}"
            labels[group.group_name] = f"{group.group_desc} ({shown})"
        return labels[group.group_name]

    def recorded(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def joined(group: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.join(f"{name} over {label(group)}")
            return call(group, *args, **kwargs)

        return joined

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.turn(WAITS)
        try:
            result = waits(work, *args, **kwargs)
        except BaseException:
            recorder.turn(FAILED)
            raise
        recorder.turn(COMPUTES)
        return result

    for method, name in _METHODS.items():
        setattr(dist.ProcessGroup, method, recorded(getattr(dist.ProcessGroup, method), name))
    waits = dist.Work.wait
    setattr(dist.Work, "wait", wait)  # noqa: B010  (mypy refuses to assign a method)


class Monitor:
    """Reads the records of all ranks and tells when one is stuck. Ages are counted by the reader, in time that it has
    itself been running, so that clocks of nodes need not agree and a job that was suspended whole goes on."""

    def __init__(self, folder: Path, world_size: int, timeout_s: float, every_s: float = BEAT_S) -> None:
        """`every_s` is how often `check` is called."""
        self.folder, self.world_size, self.timeout_s = folder, world_size, timeout_s
        self._every_s = every_s
        self._seen: dict[tuple[int, str], tuple[int, float]] = {}  # value and seconds since it changed
        self._last = time.monotonic()

    def check(self) -> str | None:
        """One line about ranks that are stuck: not run for FROZEN_S, or no stage and no collective for timeout_s.

        With a short timeout_s the first is told after FROZEN_PART of it, so before the second, which it implies.
        """
        now = time.monotonic()
        passed, self._last = min(now - self._last, 2 * self._every_s), now
        frozen, still = [], []
        for rank in range(self.world_size):
            record = self._read(rank)
            if record is None:
                continue
            if self._age((rank, "beats"), record[0], passed) > min(FROZEN_S, FROZEN_PART * self.timeout_s):
                frozen.append(rank)
            if self._age((rank, "changes"), record[1], passed) > self.timeout_s:
                still.append(rank)
        if frozen:
            return self._line(frozen, "beats", "does not run (stopped or starved)")
        if still:
            busy = [rank for rank in still if (record := self._read(rank)) and record[2] == COMPUTES]
            return self._line(busy or still, "changes", f"makes no progress (parallel.timeout_s={self.timeout_s:g})")
        return None

    def describe(self, rank: int) -> str:
        """Stage and last collective of a rank."""
        record = self._read(rank)
        if record is None:
            return "before it had joined the other ranks"
        _, _, state, joined, stage, collective = record
        if not joined:
            return f"in stage {stage}, no collective yet"
        how = {COMPUTES: "past", WAITS: "waits in", FAILED: "failed in"}[state]
        return f"in stage {stage}, {how} collective {joined}, {collective}"

    def _line(self, ranks: list[int], clock: str, what: str) -> str:
        def about(rank: int) -> str:
            return f"rank {rank} {self.describe(rank)}, {self._seen[rank, clock][1]:.0f} s"

        names = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
        others = [rank for rank in range(self.world_size) if rank not in ranks]
        shown = [about(rank) for rank in (*ranks[:SHOWN], *others)[:SHOWN] if (rank, clock) in self._seen]
        return f"rank{'s' * (len(ranks) > 1)} {names} {what}; " + "; ".join(shown)

    def _read(self, rank: int) -> tuple[int, int, int, int, str, str] | None:
        try:
            data = _file(self.folder, rank).read_bytes()
        except FileNotFoundError:
            return None
        if len(data) < _RECORD.size:
            return None
        *numbers, stage, collective = _RECORD.unpack(data[: _RECORD.size])
        words = [text.rstrip(b"\0").decode(errors="replace") for text in (stage, collective)]
        return (*numbers, *words) if words[0] else None

    def _age(self, key: tuple[int, str], value: int, passed: float) -> float:
        before, age = self._seen.get(key, (value, 0.0))
        age = age + passed if before == value else 0.0
        self._seen[key] = (value, age)
        return age
