"""A Ray cluster of two nodes on this machine, with GPUs that are only counted, and runs of small programs on it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from megarl.knobs import UserError
from megarl.launcher import ray as launcher
from megarl.launcher.job import Job

PLACE = (  # says where it runs, and dies with its actor as ranks and servers do
    "import os, time; from pathlib import Path; from megarl.processes import die_with_parent;"
    "die_with_parent(int(os.environ['MEGARL_PARENT_PID'])); folder = Path(os.environ['MEGARL_JOB_FOLDER']);"
    "print(os.environ.get('RANK'), os.environ['LOCAL_RANK'] if 'RANK' in os.environ else '',"
    " os.environ['CUDA_VISIBLE_DEVICES'], os.environ['MEGARL_TEST'], flush=True);"
)
RANK = PLACE + "(folder / ('pid_' + os.environ['RANK'])).write_text(str(os.getppid())); time.sleep({seconds})"
NODE_LIMIT_S = 150.0  # to begin a last start of a node: Ray gives its agents 15 s and the node 30 s
SERVER = PLACE + "\nwhile not (folder / 'trainers-ended').exists(): time.sleep(0.05)"


class Program(Job):
    """Runs a line of Python in place of megarl's commands."""

    def rank(self, rank: int, local_rank: int) -> tuple[list[str], dict[str, str]]:
        return ["-c", *self.rank_arguments], super().rank(rank, local_rank)[1]

    def server(self, index: int, first_gpu: int) -> tuple[list[str], dict[str, str]]:
        return ["-c", *self.server_arguments], super().server(index, first_gpu)[1]


def run(folder: Path, seconds: float, world_size: int = 3, servers: int = 1, server_gpus: int = 2) -> None:
    (folder / "job").mkdir(parents=True)
    rank = RANK.format(seconds=seconds)
    job = Program(folder, folder / "job", (rank,), (SERVER,), {}, world_size, servers, server_gpus, 2, 60.0)
    try:
        print(folder.name, "code", launcher.launch(job), flush=True)
    except UserError as error:
        print(folder.name, "refused", error, flush=True)


def kill_the_actor_of_rank_1(folder: Path) -> None:
    file = folder / "job" / "pid_1"
    while not file.exists() or not file.read_text():
        time.sleep(0.05)
    os.kill(int(file.read_text()), signal.SIGKILL)


def add_node(cluster: Any) -> None:
    """Adds a node of 4 CPUs and 2 counted GPUs. Ray ends one that a busy machine starts too slowly, so tries again."""
    end = time.monotonic() + NODE_LIMIT_S
    while True:
        try:
            cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=launcher.OBJECT_STORE_BYTES)
            return
        except Exception as error:  # the class that Ray raises itself
            print("a node did not start:", error, file=sys.stderr, flush=True)
            if time.monotonic() > end:
                raise


def main(out: Path) -> None:
    os.environ.update(
        launcher.OWN_CLUSTER, RAY_AUTH_TOKEN="t" * 64, RAY_USAGE_STATS_ENABLED="0", MEGARL_TEST="passed on"
    )
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(3):
            add_node(cluster)
        os.environ[launcher.ADDRESS] = cluster.address
        run(out / "whole", 0.5)
        threading.Thread(target=kill_the_actor_of_rank_1, args=(out / "lost",), daemon=True).start()
        run(out / "lost", 600)
        launcher.PLACE_DEADLINE_S = 2.0
        run(out / "full", 0.5, servers=3)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
