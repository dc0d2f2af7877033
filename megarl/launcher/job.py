"""The processes of a run that a launcher starts: trainer ranks and rollout servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.parallel.rendezvous import JOB_FOLDER
from megarl.parallel.watchdog import WATCH

LOGS = "MEGARL_LOGS"  # folder of SGLang's own logs
INDEX = "MEGARL_SERVER_INDEX"
FIRST_GPU = "MEGARL_FIRST_SERVER_GPU"  # first GPU of the servers, from 0, on a node that they share with trainers


@dataclass(frozen=True)
class Job:
    """Processes of one run. All of them see both folders."""

    logs: Path  # this attempt's log files, one a process
    folder: Path  # this attempt's meeting point: addresses and watchdog records
    rank_arguments: tuple[str, ...]  # to `python -m megarl.train`, alike on every rank
    server_arguments: tuple[str, ...]  # to `python -m megarl.launcher.server_task`
    environment: Mapping[str, str]  # added to every process
    world_size: int
    servers: int
    server_gpus: int  # GPUs of one server
    gpus_per_node: int  # 0: no GPU is used
    timeout_s: float  # see `watchdog.Monitor`

    @property
    def watch(self) -> Path:
        """Folder of the ranks' watchdog records."""
        return self.folder / "watch"

    def log(self, task: str) -> Path:
        """Log file of a process, by a name such as "rank 3"."""
        return self.logs / f"{task.replace(' ', '_')}.log"

    def rank(self, rank: int, local_rank: int) -> tuple[list[str], dict[str, str]]:
        """Python's arguments and the environment of a rank. Variables have torchrun's names where it has them."""
        place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.world_size)}
        environment = {**self.environment, JOB_FOLDER: str(self.folder), WATCH: str(self.watch), **place}
        return ["-m", "megarl.train", *self.rank_arguments], environment

    def server(self, index: int, first_gpu: int) -> tuple[list[str], dict[str, str]]:
        """Python's arguments and the environment of a server. Its GPUs begin at `first_gpu` of its visible ones."""
        place = {INDEX: str(index), LOGS: str(self.logs), FIRST_GPU: str(first_gpu)}
        environment = {**self.environment, JOB_FOLDER: str(self.folder), **place}
        return ["-m", "megarl.launcher.server_task", *self.server_arguments], environment


def become_train(launcher: str) -> None:
    """Replaces this process by `python -m megarl.train ... launcher=NAME`."""
    os.execv(sys.executable, [sys.executable, "-m", "megarl.train", *sys.argv[1:], f"launcher={launcher}"])
