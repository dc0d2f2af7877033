"""Finds the ranks that died or hang, from a record that each rank keeps outside its process.

The record is a small memory-mapped file with the rank's stage and the last collective it joined. A write costs about a
microsecond, and the file outlives the process. `Monitor` reads the records of all ranks. It runs in the local launcher
or, without one, in ranks 0 and 1. This module imports torch only when needed, because the launcher reads it.
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

WATCH = "MEGARL_WATCH"  # folder of the records, set by the local launcher for its ranks
BEAT_S = 0.5
GUARD_EVERY = 10  # beats between checks of ranks that watch each other, and between flushes to a network file system
FROZEN_S = 60.0  # a process without a beat for this long is stopped or starved
FROZEN_SHARED_S = 600.0  # the same where records lie on a file system in a network, whose server may not answer so long
FROZEN_PART = 0.8  # of parallel.timeout_s, if that is less: a frozen rank is reported before a stuck one
STALLED_PART = 0.5  # of parallel.timeout_s: a rank that has computed for so long is what others wait for
GRACE_S = 30.0  # collectives fail this long after parallel.timeout_s, so that the monitor reports first
EXIT_STUCK = 70  # EX_SOFTWARE
SHOWN = 4  # ranks described in one line

START, AFTER = "start", "after "  # stage of a rank before its first stage, and prefix of one between two
COMPUTES, WAITS, FAILED = range(3)
_RECORD = struct.Struct("<qqqq48s104s")  # beats, changes, state, collectives joined, stage, last collective
_BEATS = struct.Struct("<q")

# ProcessGroup's methods, and the names of the torch.distributed calls that use them.
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
    """This rank's record, in a mapped file; on a `shared` file system in memory, which `flush` writes to the file.

    The pages of a network file may take long, and Python's mmap waits for them with the interpreter's lock.
    """

    def __init__(self, folder: Path, rank: int, *, shared: bool = False) -> None:
        self._file = os.open(_file(folder, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._file, _RECORD.size)
        self._map = mmap.mmap(-1 if shared else self._file, _RECORD.size)
        self.beats = self.changes = self.joined = 0
        self.state, self.stage, self.collective = COMPUTES, START, ""

    def beat(self) -> None:
        self.beats += 1
        _BEATS.pack_into(self._map, 0, self.beats)

    def flush(self) -> None:
        """Writes the record to the file, so that other machines see it. Other threads run meanwhile."""
        os.pwrite(self._file, self._map[:], 0)
        os.fsync(self._file)

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


def start(
    folder: Path, rank: int, world_size: int, timeout_s: float, *, guard: bool = False, shared: bool = False
) -> None:
    """Starts this rank's record in `folder`. Later calls in the same process do nothing.

    `shared`: the folder lies on a file system in a network, and the record is flushed to it every few seconds. With
    `guard`, it is shared, and ranks 0 and 1 monitor all ranks. If a rank is stuck, they print one line and exit with
    EXIT_STUCK. The launchers `local` and `ray` monitor from outside and need no guard.
    """
    global _recorder
    if _recorder is not None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    shared = shared or guard
    _recorder = _Recorder(folder, rank, shared=shared)
    _recorder.write()
    _record_collectives(_recorder)
    monitor = None
    if guard and rank < 2:
        monitor = Monitor(folder, world_size, timeout_s, BEAT_S * GUARD_EVERY, FROZEN_SHARED_S)
    threading.Thread(target=_beat, args=(_recorder, shared, monitor), name="megarl-watchdog", daemon=True).start()


def _beat(recorder: _Recorder, shared: bool, monitor: Monitor | None) -> None:
    problem, said = None, ""
    while True:
        recorder.beat()
        if shared and recorder.beats % GUARD_EVERY == 1:
            problem = monitor.check() if monitor is not None else None
            try:
                recorder.flush()
            except OSError as error:  # of the shared file system: it must not end this thread
                if said != (said := f"megarl: the ranks' records cannot be kept now: {error}"):
                    print(said, file=sys.stderr, flush=True)
        if problem:
            print(f"megarl: {problem}", file=sys.stderr, flush=True)
            os._exit(EXIT_STUCK)  # the main thread may be in a collective that cannot be interrupted
        time.sleep(BEAT_S)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Records `name` as the rank's stage inside the context. After the outermost one the stage is "after `name`"."""
    if (recorder := _recorder) is None:
        yield
        return
    before, recorder.stage = recorder.stage, name
    recorder.write()
    yield  # after an error the record keeps this stage
    recorder.stage = f"{AFTER}{name}" if before == START or before.startswith(AFTER) else before
    recorder.write()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Records that this rank waits for another one inside the context, as in a collective named `what`."""
    if (recorder := _recorder) is None:
        yield
        return
    recorder.join(what)
    recorder.turn(WAITS)
    yield  # after an error the record stays
    recorder.turn(COMPUTES)


def _record_collectives(recorder: _Recorder) -> None:
    """Patches torch.distributed to record when this process joins, waits for and finishes a collective."""
    import torch.distributed as dist

    labels: dict[str, str] = {}

    def label(group: Any) -> str:
        if group.group_name not in labels:
            ranks = dist.get_process_group_ranks(group)
            members = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > SHOWN else ", ".join(map(str, ranks))
            labels[group.group_name] = f"{group.group_desc} (ranks {members})"
        return labels[group.group_name]

    def recorded(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def joined(group: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.join(f"{name} over {label(group)}")
            return call(group, *args, **kwargs)

        return joined

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.turn(WAITS)
        try:
            result = original_wait(work, *args, **kwargs)
        except BaseException:
            recorder.turn(FAILED)
            raise
        recorder.turn(COMPUTES)
        return result

    for method, name in _METHODS.items():
        setattr(dist.ProcessGroup, method, recorded(getattr(dist.ProcessGroup, method), name))
    original_wait = dist.Work.wait
    setattr(dist.Work, "wait", wait)  # noqa: B010  (mypy refuses to assign a method)


class Monitor:
    """Reads the records of all ranks and reports stuck ones.

    The reader measures the age of a record in its own running time. Clocks of nodes need not agree, and suspending and
    resuming a whole job is not an error.
    """

    def __init__(
        self, folder: Path, world_size: int, timeout_s: float, every_s: float = BEAT_S, frozen_s: float = FROZEN_S
    ) -> None:
        """Starts with no records seen; `every_s` is the time between calls of `check`."""
        self.folder, self.world_size, self.timeout_s = folder, world_size, timeout_s
        self._every_s, self._frozen_s = every_s, min(frozen_s, FROZEN_PART * timeout_s)
        self._seen: dict[tuple[int, str], tuple[int, float]] = {}  # last value, and seconds since it changed
        self._last_check = time.monotonic()

    def check(self) -> str | None:
        """Returns one line about stuck ranks, or None.

        A rank is frozen after `frozen_s` without a beat. It makes no progress after `timeout_s` without a new stage or
        collective. A frozen rank makes no progress either, so with a short `timeout_s` it is reported as frozen after
        FROZEN_PART of it.
        """
        now = time.monotonic()
        elapsed, self._last_check = min(now - self._last_check, 2 * self._every_s), now
        frozen, no_progress = [], []
        for rank in range(self.world_size):
            record = self._read(rank)
            if record is None:
                continue
            if self._age((rank, "beats"), record[0], elapsed) > self._frozen_s:
                frozen.append(rank)
            if self._age((rank, "changes"), record[1], elapsed) > self.timeout_s:
                no_progress.append(rank)
        if frozen:
            return self._line(frozen, "beats", "does not run (stopped or starved)")
        if no_progress:
            return self._line(
                self._waited_for(no_progress),
                "changes",
                f"makes no progress (parallel.timeout_s={self.timeout_s:g})",
            )
        return None

    def _waited_for(self, no_progress: list[int]) -> list[int]:
        """Returns the ranks that compute, because ranks in a collective wait for them; else `no_progress`.

        A rank that others already wait for may have changed later than they did. If all of `no_progress` wait, a rank
        that has computed for STALLED_PART of `timeout_s` is probably the one they wait for.
        """
        computing = [rank for rank in range(self.world_size) if (record := self._read(rank)) and record[2] == COMPUTES]
        stalled_s = STALLED_PART * self.timeout_s
        return (
            [rank for rank in computing if rank in no_progress]
            or [rank for rank in computing if self._seen.get((rank, "changes"), (0, 0.0))[1] > stalled_s]
            or no_progress
        )

    def collective_failed(self, rank: int) -> bool:
        """True if the rank's last collective raised, as it does when another rank of its group has ended."""
        record = self._read(rank)
        return record is not None and record[2] == FAILED

    def describe(self, rank: int) -> str:
        """Describes the stage and last collective of a rank."""
        record = self._read(rank)
        if record is None:
            return "before it had joined the other ranks"
        _, _, state, joined, stage, collective = record
        where = stage if stage.startswith(AFTER) else f"in stage {stage}"
        if not joined:
            return f"{where}, no collective yet"
        relation = {COMPUTES: "past", WAITS: "waits in", FAILED: "failed in"}[state]
        return f"{where}, {relation} collective {joined}, {collective}"

    def _line(self, ranks: list[int], clock: str, problem: str) -> str:
        def description(rank: int) -> str:
            return f"rank {rank} {self.describe(rank)}, {self._seen[rank, clock][1]:.0f} s"

        names = ", ".join(map(str, ranks[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
        others = [rank for rank in range(self.world_size) if rank not in ranks]
        details = [description(rank) for rank in (*ranks[:SHOWN], *others)[:SHOWN] if (rank, clock) in self._seen]
        return f"rank{'s' * (len(ranks) > 1)} {names} {problem}; " + "; ".join(details)

    def _read(self, rank: int) -> tuple[int, int, int, int, str, str] | None:
        try:
            data = _file(self.folder, rank).read_bytes()
        except OSError:  # not there yet, or the shared file system fails for a while
            return None
        if len(data) < _RECORD.size:
            return None
        *numbers, stage, collective = _RECORD.unpack(data[: _RECORD.size])
        words = [text.rstrip(b"\0").decode(errors="replace") for text in (stage, collective)]
        return (*numbers, *words) if words[0] else None

    def _age(self, key: tuple[int, str], value: int, elapsed: float) -> float:
        before, age = self._seen.get(key, (value, 0.0))
        age = age + elapsed if before == value else 0.0
        self._seen[key] = (value, age)
        return age
