"""Starts the trainer ranks on this machine, one process each, and ends them together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.parallel.config import ParallelConfig
from megarl.parallel.watchdog import BEAT_S, WATCH, Monitor

STOP_DEADLINE_S = 60.0  # for the other ranks, once one has ended well: they leave together
FAILURE_GRACE_S = 15.0  # for the other ranks to clean up, once one has failed
LOG_TAIL_LINES = 15
PARENT = "MEGARL_PARENT_PID"


def rank_environment(rank: int, world_size: int, scratch: Path) -> dict[str, str]:
    """What a rank learns from its environment; the names are torchrun's where it has them.

    Ranks meet through a file in `scratch`, keep their records there and talk over the loopback device.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads of one rank would starve the others
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MEGARL_RENDEZVOUS": str(scratch / "rendezvous"),
        WATCH: str(scratch),
        PARENT: str(os.getpid()),
    }


def run_ranks(
    module: str, arguments: list[str], world_size: int, log_dir: Path, timeout_s: float = ParallelConfig.timeout_s
) -> int:
    """Runs `python -m module arguments` as `world_size` ranks and returns 0, or the exit code of one that failed.

    Rank 0 writes to this terminal, the others to `log_dir/rank_N.log`. Ctrl-C and SIGTERM are passed to rank 0, which
    stops the run in order. When a rank fails, its stage, its last collective and the end of its log are shown, and the
    others get FAILURE_GRACE_S seconds, then SIGKILL. When one is stuck for `timeout_s` seconds (see
    `watchdog.Monitor`), all get SIGKILL at once. No rank outlives this process.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-ranks-") as scratch, contextlib.ExitStack() as files:
        processes = []
        for rank in range(world_size):
            log = None if rank == 0 else files.enter_context(open(log_dir / f"rank_{rank}.log", "ab"))
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    env=rank_environment(rank, world_size, Path(scratch)),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # signals to this group come to this process, which passes them on
                )
            )
        with _passed_on(processes[0]):
            return _wait(processes, log_dir, Monitor(Path(scratch), world_size, timeout_s))


def _wait(processes: list[subprocess.Popen[bytes]], log_dir: Path, monitor: Monitor) -> int:
    """Waits for all ranks. Once one has ended, the others have a deadline; a stuck one ends all."""
    deadline, looked = None, time.monotonic()
    while None in (codes := [process.poll() for process in processes]):
        now, stuck = time.monotonic(), None
        if deadline is None and any(code is not None for code in codes):
            deadline = now + (FAILURE_GRACE_S if any(codes) else STOP_DEADLINE_S)
            _report(codes, log_dir, monitor)
        if deadline is None and now > looked + BEAT_S:
            looked, stuck = now, monitor.check()
        if stuck or (deadline is not None and now > deadline):
            if stuck:
                print(f"megarl: {stuck}; ended all ranks", file=sys.stderr)
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            return next((code for code in codes if code), 1)
        time.sleep(0.05)
    if deadline is None:
        _report(codes, log_dir, monitor)
    return next((code for code in codes if code), 0)


def _report(codes: list[int | None], log_dir: Path, monitor: Monitor) -> None:
    """Shows where ranks were that failed, and the end of the logs of those that write one; rank 0 speaks for itself
    unless a signal killed it."""
    for rank, code in enumerate(codes):
        if not code or (rank == 0 and code > 0):
            continue
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        line = f"megarl: rank {rank} {how} {monitor.describe(rank)}"
        if rank:
            log = log_dir / f"rank_{rank}.log"
            tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            line += f"; its log {log} ends:\n" + "\n".join("  " + text for text in tail)
        print(line, file=sys.stderr)


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes SIGTERM and SIGINT on to `process`."""
    previous = {
        number: signal.signal(number, lambda received, _: process.send_signal(received))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
