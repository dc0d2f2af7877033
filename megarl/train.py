"""Trains a model: `python -m megarl.train +experiment=gsm8k_grpo [group=name ...] [knob=value ...]`.

Starts the trainer ranks itself where the layout has more than one, unless torchrun did.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil

from megarl.cli import run_command
from megarl.config import Config
from megarl.launcher.local import PARENT, run_ranks
from megarl.observe.run_folder import RunFolder
from megarl.parallel import rendezvous
from megarl.processes import die_with_parent
from megarl.trainer.announce import announce
from megarl.trainer.folder import make_folder
from megarl.trainer.read import Inputs, read_inputs

RUN_FOLDER, STARTED = "MEGARL_RUN_FOLDER", "MEGARL_STARTED"  # from the command to the ranks it starts


def main(config: Config) -> int:
    """Checks everything that can be checked, makes the run folder, and trains. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is open is closed, in order
    started = float(os.environ.get(STARTED) or time.monotonic() - (time.time() - psutil.Process().create_time()))
    world, rank = config.parallel.world_size(), int(os.environ.get("RANK", "0"))
    inputs = read_inputs(config, rank)
    if world > 1 and "RANK" not in os.environ:
        folder = make_folder(config)
        os.environ[RUN_FOLDER], os.environ[STARTED] = str(folder.path), str(started)
        return run_ranks("megarl.train", sys.argv[1:], world, folder.logs, config.parallel.timeout_s)
    folder = find_folder(config, rank)
    if rank == 0:
        announce(config, inputs, folder)
    train(config, folder, inputs, started)
    return 0


def train(config: Config, folder: RunFolder, inputs: Inputs, started: float) -> None:
    """Runs the loop of the method; its modules load Megatron."""
    if config.method == "sft":
        from megarl.trainer import sft

        sft.train(config, folder, inputs, started)
    elif config.method == "preference":
        from megarl.trainer import preference

        preference.train(config, folder, inputs, started)
    else:
        from megarl.trainer import rl

        rl.train(config, folder, inputs, started)


def find_folder(config: Config, rank: int) -> RunFolder:
    """The run's folder on every rank: from the command that started the ranks, else rank 0 makes it."""
    given, job = os.environ.get(RUN_FOLDER), rendezvous.job_folder()
    if given and job is None:
        return RunFolder(Path(given))
    if "RANK" not in os.environ:
        return make_folder(config)
    from megarl.parallel import groups, watchdog
    from megarl.parallel.broadcast import broadcast_json

    groups.initialize(config.parallel)
    if given:
        found = RunFolder(Path(given))
    else:
        folder = make_folder(config) if rank == 0 else None
        found = RunFolder(Path(broadcast_json(str(folder.path) if folder else None)))
    watch = (job or found.logs) / "watch"  # no launcher watches the ranks of several machines: they do it themselves
    watchdog.start(watch, rank, config.parallel.world_size(), config.parallel.timeout_s, guard=True)
    return found


if __name__ == "__main__":
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    run_command(main)
