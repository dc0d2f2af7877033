"""What a launcher is asked to start: the ranks of a run, and its servers as processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.parallel.rendezvous import JOB_FOLDER
from megarl.parallel.watchdog import WATCH

LOGS = "MEGARL_LOGS"  # where a server's SGLang writes its log
INDEX = "MEGARL_SERVER_INDEX"
FIRST_GPU = "MEGARL_FIRST_SERVER_GPU"  # on a node that servers share with trainers; counted from 0


@dataclass(frozen=True)
class Job:
    """Processes of one run, which all see both folders."""

    logs: Path  # of this attempt, one a process
    folder: Path  # of this attempt alone: where they meet and keep their records
    rank_arguments: tuple[str, ...]  # of `python -m megarl.train`, alike on every rank
    server_arguments: tuple[str, ...]  # of `python -m megarl.launcher.server_task`
    environment: Mapping[str, str]  # of all of them
    world_size: int
    servers: int
    server_gpus: int  # of one server
    gpus_per_node: int  # 0: no GPU is used
    timeout_s: float  # see `watchdog.Monitor`

    @property
    def watch(self) -> Path:
        """The ranks' records."""
        return self.folder / "watch"

    def log(self, task: str) -> Path:
        """The log of a process by its name, such as "rank 3"."""
        return self.logs / f"{task.replace(' ', '_')}.log"

    def rank(self, rank: int, local_rank: int) -> tuple[list[str], dict[str, str]]:
        """Python's arguments for a rank, and what it learns from its environment; the names are torchrun's where it
        has them."""
        where = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.world_size)}
        found = {**self.environment, JOB_FOLDER: str(self.folder), WATCH: str(self.watch), **where}
        return ["-m", "megarl.train", *self.rank_arguments], found

    def server(self, index: int, first_gpu: int) -> tuple[list[str], dict[str, str]]:
        """The same for a server, whose GPUs begin with `first_gpu` of those it sees."""
        where = {INDEX: str(index), LOGS: str(self.logs), FIRST_GPU: str(first_gpu)}
        found = {**self.environment, JOB_FOLDER: str(self.folder), **where}
        return ["-m", "megarl.launcher.server_task", *self.server_arguments], found


def become_train(launcher: str) -> None:
    """`python -m megarl.launcher.NAME ...` is `python -m megarl.train ... launcher=NAME`, in this very process."""
    os.execv(sys.executable, [sys.executable, "-m", "megarl.train", *sys.argv[1:], f"launcher={launcher}"])
