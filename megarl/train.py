"""Trains: `python -m megarl.train [SCRIPT.py] [--config FILE] +experiment=NAME [group=name ...] [knob=value ...]`.

Starts the trainer ranks itself, by the launcher that is configured, unless torchrun or srun did. With a training script
every rank runs that, in place of megarl's own loops, beside servers whose addresses are in its environment.
"""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import sys
import time
from pathlib import Path

import psutil

from megarl import cli
from megarl.config import Config
from megarl.families import local_folder
from megarl.knobs import UserError
from megarl.launcher import local, ray
from megarl.launcher.job import Job
from megarl.launcher.local import PARENT, run_ranks
from megarl.observe.run_folder import RunFolder
from megarl.parallel import rendezvous
from megarl.processes import die_with_parent
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.client.sglang_client import ADDRESSES_VARIABLE, KEY_VARIABLE, addresses_in_environment
from megarl.rollout.servers.external import JobServers
from megarl.rollout.servers.sglang_server import check_config as check_server
from megarl.trainer.announce import announce
from megarl.trainer.inputs import Inputs, read_inputs
from megarl.trainer.saved_config import make_folder

RUN_FOLDER, STARTED = "MEGARL_RUN_FOLDER", "MEGARL_STARTED"  # from the command to the ranks it starts


def command(arguments: list[str]) -> int:
    """Runs megarl's own loops, or the training script among the arguments. Returns the exit code."""
    found = [argument for argument in arguments if _is_script(argument)]
    config = cli.load(_without_script(arguments))
    if found and not Path(found[0]).is_file():
        raise UserError(f"the training script {found[0]} is not a file here; give its path")
    if config.launcher == "slurm" and "RANK" not in os.environ:
        from megarl.launcher import slurm

        return slurm.launch(config, sys.argv[1:])
    return script_main(Path(found[0]).resolve(), config) if found else main(config)


def _is_script(argument: str) -> bool:
    return argument.endswith(".py") and "=" not in argument


def main(config: Config) -> int:
    """Checks everything that can be checked, makes the run folder, and trains. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is open is closed, in order
    started = float(os.environ.get(STARTED) or time.monotonic() - (time.time() - psutil.Process().create_time()))
    world, rank = config.parallel.world_size(), int(os.environ.get("RANK", "0"))
    inputs = read_inputs(config, rank)
    if "RANK" not in os.environ and (world > 1 or config.launcher != "local"):
        folder = make_folder(config)
        os.environ[RUN_FOLDER] = str(folder.path)
        if config.launcher == "local":  # rank 0 starts the servers
            os.environ[STARTED] = str(started)
            return run_ranks("megarl.train", sys.argv[1:], world, folder.logs, config.parallel.timeout_s)
        return ray.launch(job_of(config, folder, sys.argv[1:]))
    folder = find_folder(config, rank)
    if rank == 0:
        announce(config, inputs, folder)
    train(config, folder, inputs, started)
    return 0


def script_main(script: Path, config: Config) -> int:
    """Has the launcher run the script on every rank; on a rank, runs it. Its data is its own to read and check."""
    if "RANK" in os.environ:
        return run_script(script, config)
    if config.method == "rl":
        read_inputs(config, rank=1)  # all but the data, which rank 0 reads
        check_server(config.server, local_folder(config.actor.path), config.sglang)
    folder = make_folder(config)
    os.environ[RUN_FOLDER] = str(folder.path)
    job = job_of(config, folder, [str(script), *_without_script(sys.argv[1:])])
    return {"local": local.launch, "ray": ray.launch}[config.launcher](job)


def run_script(script: Path, config: Config) -> int:
    """Runs the script as Python would, on a rank; the servers that a launcher started are awaited first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ[RUN_FOLDER] = str(find_folder(config, int(os.environ["RANK"])).path)
    job = rendezvous.job_folder()
    if job is not None and config.method == "rl" and not addresses_in_environment():
        key, server = os.environ.get(KEY_VARIABLE, ""), config.server
        servers = JobServers(job, server.n_servers, key, WEIGHT_LOADER, server.ready_timeout_s)
        servers.wait_ready()
        os.environ[ADDRESSES_VARIABLE] = ",".join(servers.addresses)
    sys.argv = [str(script), *_without_script(sys.argv[1:])]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _without_script(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if not _is_script(argument)]


def job_of(config: Config, folder: RunFolder, arguments: list[str]) -> Job:
    """The processes of the run, for a launcher; servers among them unless others are named in the environment."""
    given, logs = bool(addresses_in_environment()), folder.new_attempt()
    (logs / "job").mkdir()
    return Job(
        logs=logs,
        folder=logs / "job",
        rank_arguments=tuple(arguments),
        server_arguments=tuple(_without_script(arguments)),
        environment={} if given else {KEY_VARIABLE: secrets.token_hex(24)},
        world_size=config.parallel.world_size(),
        servers=config.server.n_servers if config.method == "rl" and not given else 0,
        server_gpus=config.server.tp_size,
        gpus_per_node=config.cluster.gpus_per_node,
        timeout_s=config.parallel.timeout_s,
    )


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
    cli.exit_with(command)
