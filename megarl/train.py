"""Trains a model: `python -m megarl.train +experiment=gsm8k_grpo [group=name ...] [knob=value ...]`.

Starts the trainer ranks itself where the layout has more than one, unless torchrun did.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from megarl.cli import run_command
from megarl.config import Config
from megarl.launcher.local import PARENT, run_ranks
from megarl.observe.run_folder import RunFolder, new_run, open_run
from megarl.processes import die_with_parent
from megarl.trainer.announce import announce
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


def make_folder(config: Config) -> RunFolder:
    """The run's folder, new with its config.yaml, or the one to resume, which keeps its own."""
    if not config.resume:
        folder = new_run(config.run_root, config.experiment_name)
        OmegaConf.save(OmegaConf.structured(config), folder.config)
        return folder
    folder = open_run(config.resume)
    for name, (was, now) in differences(OmegaConf.load(folder.config), OmegaConf.structured(config)).items():
        print(f"resumed with {name}={now}, the run began with {was}", flush=True)
    OmegaConf.save(OmegaConf.structured(config), folder.path / "config.resumed.yaml")
    return folder


def differences(before: Any, now: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The knobs, by dotted path, that differ between two configurations; where they lie is none of it."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*before, *now]):
        a, b = before.get(key), now.get(key)
        if isinstance(a, DictConfig) and isinstance(b, DictConfig):
            found.update(differences(a, b, f"{prefix}{key}."))
        elif a != b and prefix + key not in ("resume", "run_root"):
            found[prefix + key] = (a, b)
    return found


def find_folder(config: Config, rank: int) -> RunFolder:
    """The run's folder on every rank: from the command that started the ranks, else rank 0 makes it."""
    if RUN_FOLDER in os.environ:
        return RunFolder(Path(os.environ[RUN_FOLDER]))
    if "RANK" not in os.environ:
        return make_folder(config)
    from megarl.parallel import groups, watchdog
    from megarl.parallel.broadcast import broadcast_json

    groups.initialize(config.parallel)
    folder = make_folder(config) if rank == 0 else None
    found = RunFolder(Path(broadcast_json(str(folder.path) if folder else None)))
    watchdog.start(found.logs / "watch", rank, config.parallel.world_size(), config.parallel.timeout_s, guard=True)
    return found


if __name__ == "__main__":
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    run_command(main)
