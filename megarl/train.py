"""Trains: `python -m megarl.train [SCRIPT.py] [--config FILE] +experiment=NAME [group=name ...] [knob=value ...]`.

Starts the trainer ranks through the configured launcher, unless torchrun or srun did. With a training script every
rank runs the script in place of megarl's own loops; the servers' addresses are in its environment.
"""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from megarl import cli
from megarl.checks import gpu_count_checks, machine_checks, server_checks
from megarl.config import Config
from megarl.hub import local_folder
from megarl.knobs import UserError, run_all
from megarl.launcher import local, ray
from megarl.launcher.job import Job
from megarl.launcher.local import PARENT, run_ranks
from megarl.observe.run_folder import RunFolder
from megarl.parallel import rendezvous
from megarl.processes import die_with_parent
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.client.connections import ADDRESSES_VARIABLE, KEY_VARIABLE, addresses_in_environment
from megarl.rollout.servers.external import JobServers
from megarl.served_checks import adapters_on_servers
from megarl.trainer.adapter_configs import load_adapters
from megarl.trainer.announce import announce
from megarl.trainer.inputs import Inputs, read_inputs
from megarl.trainer.saved_config import make_adapter_folder, make_folder

RUN_FOLDER, STARTED = "MEGARL_RUN_FOLDER", "MEGARL_STARTED"  # passed from the command to its ranks


def command(arguments: list[str]) -> int:
    """Runs megarl's own loops, or the training script among the arguments. Returns the exit code."""
    scripts = [argument for argument in arguments if _is_script(argument)]
    knobs = _without_script(arguments)
    config = cli.load(knobs)
    if scripts and not Path(scripts[0]).is_file():
        raise UserError(f"the training script {scripts[0]} is not a file here; give its path")
    if config.launcher == "slurm" and "RANK" not in os.environ:
        from megarl.launcher import slurm

        return slurm.launch(config, sys.argv[1:])
    if scripts:
        if config.adapters:
            raise UserError(
                f"adapters={list(config.adapters)} are trained by megarl's own loop, and {scripts[0]} brings another; "
                "leave one of them out"
            )
        return script_main(Path(scripts[0]).resolve(), config)
    return adapters_main(config, load_adapters(knobs, config)) if config.adapters else main(config)


def _is_script(argument: str) -> bool:
    return argument.endswith(".py") and "=" not in argument


def main(config: Config) -> int:
    """Checks all inputs, makes the run folder, and trains. Returns the exit code."""
    started, rank = _begin(config)
    inputs = read_inputs(config, rank)
    if (code := _start_ranks(config, started)) is not None:
        return code
    folder = find_folder(config, rank)
    if rank == 0:
        announce(config, inputs, folder)
    train(config, folder, inputs, started)
    return 0


def adapters_main(config: Config, configs: Mapping[str, Config]) -> int:
    """Does as `main` for the job `config` that trains several adapters, each with a config of `configs`, by name."""
    started, rank = _begin(config)
    inputs = {name: read_inputs(own, rank) for name, own in configs.items()}
    if (code := _start_ranks(config, started)) is not None:
        return code
    folder = find_folder(config, rank)
    for name, own in configs.items():
        if rank == 0:
            announce(own, inputs[name], make_adapter_folder(folder, name, own))
    from megarl.trainer import several_adapters

    several_adapters.train(config, configs, folder, inputs, started)
    return 0


def _begin(config: Config) -> tuple[float, int]:
    """Start of the command by `time.monotonic()`, and this process's rank."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs the clean-up of open contexts
    started = float(os.environ.get(STARTED) or time.monotonic() - (time.time() - psutil.Process().create_time()))
    run_all(gpu_count_checks(config))
    return started, int(os.environ.get("RANK", "0"))


def _start_ranks(config: Config, started: float) -> int | None:
    """Has the launcher start the ranks, and returns their exit code; None if this process is a rank."""
    world = config.parallel.world_size()
    if "RANK" not in os.environ and (world > 1 or config.launcher != "local"):
        folder = make_folder(config)
        os.environ[RUN_FOLDER] = str(folder.path)
        if config.launcher == "local":  # rank 0 starts the servers
            os.environ[STARTED] = str(started)
            return run_ranks("megarl.train", sys.argv[1:], world, folder.logs, config.parallel.timeout_s)
        return ray.launch(job_of(config, folder, sys.argv[1:]))
    return None


def script_main(script: Path, config: Config) -> int:
    """Has the launcher run the script on every rank; on a rank, runs it. The script reads and checks its own data."""
    if "RANK" in os.environ:
        return run_script(script, config)
    run_all(gpu_count_checks(config))
    if config.method == "rl":
        read_inputs(config, rank=1)  # checks all but the data, which rank 0 reads
        run_all(server_checks(config, local_folder(config.actor.path)))
    folder = make_folder(config)
    os.environ[RUN_FOLDER] = str(folder.path)
    job = job_of(config, folder, [str(script), *_without_script(sys.argv[1:])])
    return {"local": local.launch, "ray": ray.launch}[config.launcher](job)


def run_script(script: Path, config: Config) -> int:
    """Waits for the servers of the launcher, if any, then runs the script on this rank as Python would."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_all(machine_checks(config))
    os.environ[RUN_FOLDER] = str(find_folder(config, int(os.environ["RANK"])).path)
    job = rendezvous.job_folder()
    if job is not None and config.method == "rl" and not addresses_in_environment():
        key, server = os.environ.get(KEY_VARIABLE, ""), config.server
        adapters = adapters_on_servers(config)
        servers = JobServers(job, server.n_servers, key, WEIGHT_LOADER, server.ready_timeout_s, adapters)
        servers.wait_ready()
        os.environ[ADDRESSES_VARIABLE] = ",".join(servers.addresses)
    sys.argv = [str(script), *_without_script(sys.argv[1:])]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _without_script(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if not _is_script(argument)]


def job_of(config: Config, folder: RunFolder, arguments: list[str]) -> Job:
    """The run's processes, for a launcher. Servers are among them unless the environment names external ones."""
    external, logs = bool(addresses_in_environment()), folder.new_attempt()
    (logs / "job").mkdir()
    return Job(
        logs=logs,
        folder=logs / "job",
        rank_arguments=tuple(arguments),
        server_arguments=tuple(_without_script(arguments)),
        environment={} if external else {KEY_VARIABLE: secrets.token_hex(24)},
        world_size=config.parallel.world_size(),
        servers=config.server.n_servers if config.method == "rl" and not external else 0,
        server_gpus=config.server.tp_size,
        gpus_per_node=config.cluster.gpus_per_node,
        timeout_s=config.parallel.timeout_s,
    )


def train(config: Config, folder: RunFolder, inputs: Inputs, started: float) -> None:
    """Runs the method's training loop, whose module loads Megatron."""
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
    """The run's folder on every rank: that of the command which started the ranks, else rank 0 makes one."""
    path, job = os.environ.get(RUN_FOLDER), rendezvous.job_folder()
    if path and job is None:
        return RunFolder(Path(path))
    if "RANK" not in os.environ:
        return make_folder(config)
    from megarl.parallel import groups, watchdog
    from megarl.parallel.broadcast import broadcast_json

    groups.initialize(config.parallel)
    if not path:
        path = broadcast_json(str(make_folder(config).path) if rank == 0 else None)
    folder = RunFolder(Path(path))
    watch = (job or folder.logs) / "watch"  # ranks on several machines have no launcher to watch them
    watchdog.start(watch, rank, config.parallel.world_size(), config.parallel.timeout_s, guard=True)
    return folder


if __name__ == "__main__":
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    cli.exit_with(command)
