"""Starts the ranks and servers of a run as processes on this machine. They end together.

python -m megarl.launcher.local [SCRIPT.py] [--config FILE] [+experiment=NAME] [group=name ...] [knob=value ...]
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megarl.launcher.job import Job, become_train
from megarl.launcher.watch import watch
from megarl.parallel.config import ParallelConfig
from megarl.parallel.rendezvous import INTERFACE
from megarl.parallel.watchdog import WATCH, Monitor

PARENT = "MEGARL_PARENT_PID"
KILL_DEADLINE_S = 10.0


class Process:
    """A child process. Writes to `log`, or to this terminal without one."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], log: Path | None) -> None:
        self.name, self.log = name, log
        with open(log, "ab") if log else contextlib.nullcontext() as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,  # terminal signals reach this process alone, which passes them on
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def lost(self) -> str:
        return ""

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_DEADLINE_S)


def rank_environment(rank: int, world_size: int, scratch: Path) -> dict[str, str]:
    """Environment of a rank. Variables have torchrun's names where it has them.

    Ranks meet through a file in `scratch`, keep their watchdog records there and use the loopback device.
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

    Rank 0 writes to this terminal, the others to `log_dir/rank_N.log`. `watch.watch` ends them together, and no rank
    outlives this process.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-ranks-") as name:
        scratch, ranks = Path(name), []
        for rank in range(world_size):
            log = log_dir / f"rank_{rank}.log" if rank else None
            environment = rank_environment(rank, world_size, scratch)
            ranks.append(Process(f"rank {rank}", ["-m", module, *arguments], environment, log))
        return watch(ranks, [], Monitor(scratch, world_size, timeout_s))


def launch(job: Job) -> int:
    """Runs the job on this machine. Returns 0, or the exit code of a process that failed.

    Rank 0 writes to this terminal. No process outlives this one.
    """
    servers = []
    for index in range(job.servers):
        arguments, variables = job.server(index, first_gpu=job.world_size + index * job.server_gpus)
        environment = {**os.environ, **variables, INTERFACE: "lo", PARENT: str(os.getpid())}
        servers.append(Process(f"server {index}", arguments, environment, job.log(f"server {index}")))
    ranks = []
    for rank in range(job.world_size):
        arguments, variables = job.rank(rank, rank)
        environment = {**rank_environment(rank, job.world_size, job.watch), **variables, INTERFACE: "lo"}
        ranks.append(Process(f"rank {rank}", arguments, environment, job.log(f"rank {rank}") if rank else None))
    return watch(ranks, servers, Monitor(job.watch, job.world_size, job.timeout_s), job.folder)


if __name__ == "__main__":
    become_train("local")
