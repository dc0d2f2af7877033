"""Submits a run to a Slurm cluster.

python -m megarl.launcher.slurm [SCRIPT.py] [--config FILE] [+experiment=NAME] [group=name ...] [knob=value ...]

On a login node it submits a job with sbatch, sized from the configuration. Inside an allocation it runs the job there.
SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT, sbatch's own variables, choose partition, account and time limit.
The job's steps are in slurm/job.sh; the templates beside it submit the same job without Python.

job.sh calls `python -m megarl.launcher.slurm plan ...`, which makes the run's folder and prints it with the plan, as
shell variables.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from megarl import cli
from megarl.config import Config
from megarl.knobs import UserError, override
from megarl.launcher.job import become_train
from megarl.launcher.machines import check_servers_fit, machines_of
from megarl.observe.run_folder import ADAPTERS
from megarl.rollout.client.connections import addresses_in_environment
from megarl.trainer.checkpoints import manifest
from megarl.trainer.saved_config import make_folder

SCRIPTS = next(p for p in (cli.PACKAGE / "slurm", cli.PACKAGE.parent / "slurm") if p.is_dir())
GRACE_S = 600  # before the time limit: for the step in progress and its checkpoint


@dataclasses.dataclass(frozen=True)
class NodePlan:
    """Trainer ranks and servers by node, in the allocation's order: ranks from the first node on, then servers."""

    ranks: int
    ranks_per_node: int
    rank_nodes: int
    servers: int
    servers_per_node: int
    server_nodes: int
    first_server_node: int
    first_server_gpu: int  # of a node that servers share with ranks; 0 if they have their own nodes

    @property
    def nodes(self) -> int:
        return max(self.rank_nodes, self.first_server_node + self.server_nodes)


def plan_of(config: Config) -> NodePlan:
    """The node plan of a run.

    Raises:
        UserError: a server would span two nodes.
    """
    machines = machines_of(config)
    check_servers_fit(machines)
    per_node, servers, tp = machines.gpus_per_node, machines.servers, machines.server_tp
    node, gpu = divmod(machines.first_server_gpu, per_node)
    fit = servers if machines.shared else min(servers, per_node // tp)
    return NodePlan(
        ranks=machines.trainers,
        ranks_per_node=min(machines.trainers, per_node),
        rank_nodes=machines.trainer_nodes,
        servers=servers,
        servers_per_node=fit,
        server_nodes=-(-servers // fit) if servers else 0,
        first_server_node=node if servers else 0,
        first_server_gpu=gpu if servers else 0,
    )


def rendered(config: Config, arguments: list[str]) -> str:
    """The batch script that `launch` submits for `arguments`. A training script must be the first of them.

    Raises:
        UserError: see `plan_of`.
    """
    options = {
        "job-name": config.experiment_name,
        "nodes": plan_of(config).nodes,
        "gpus-per-node": config.cluster.gpus_per_node,
        "mem": "0",  # all memory of a node
        "signal": f"B:USR1@{GRACE_S}",
        "open-mode": "append",
        "output": "%x_%j.out",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --exclusive",
            "#SBATCH --requeue",
            f"source {shlex.quote(str(SCRIPTS / 'job.sh'))} || exit",
            shlex.join(["train", *arguments]),
            "",
        ]
    )


def launch(config: Config, arguments: list[str]) -> int:
    """Submits the run, or runs it inside an allocation. Returns the exit code of sbatch or of the run.

    Raises:
        UserError: Slurm is not installed here, or this folder cannot take the job's output.
    """
    scripts = [argument for argument in arguments if argument.endswith(".py") and "=" not in argument]
    script = rendered(config, [*scripts, *(argument for argument in arguments if argument not in scripts)])
    if "SLURM_JOB_ID" in os.environ:
        return subprocess.run(["bash", "-c", script]).returncode
    if shutil.which("sbatch") is None:
        raise UserError("launcher=slurm: sbatch is not installed here; start it on a login node of the cluster")
    if not os.access(Path.cwd(), os.W_OK | os.X_OK):
        raise UserError(
            f"launcher=slurm: Slurm writes the job's output to {Path.cwd()}, which cannot be written: the job would "
            "fail without a word; submit it from a folder of your own that all nodes see"
        )
    return subprocess.run(["sbatch"], input=script, text=True).returncode


def prepare(config: Config) -> dict[str, str]:
    """Makes the folder of this job's run or of its next attempt. Returns the variables that job.sh reads.

    A requeued job continues in its folder, from the newest whole checkpoint if there is one.
    """
    name = f"job_{os.environ['SLURM_JOB_ID']}"
    plan, previous, resume = plan_of(config), Path(config.run_root) / config.experiment_name / name, ""
    runs = [previous, *previous.glob(f"{ADAPTERS}/*/")]
    if not config.resume and any(_has_checkpoint(run / "checkpoints") for run in runs):
        resume = str(previous.resolve())
        config = dataclasses.replace(config, resume=resume)
    folder = make_folder(config, name)
    logs = folder.new_attempt()
    job = logs / "job"
    job.mkdir()
    if addresses_in_environment():  # external servers
        plan = dataclasses.replace(plan, servers=0)
    values = {key.upper(): str(value) for key, value in dataclasses.asdict(plan).items()}
    paths = {"RUN_FOLDER": folder.path, "LOGS": logs, "JOB_FOLDER": job}
    return (
        values
        | {key: str(path.resolve()) for key, path in paths.items()}
        | {"RESUME": override("resume", resume) if resume else ""}
    )


def _has_checkpoint(folder: Path) -> bool:
    for step in manifest.step_folders(folder) if folder.is_dir() else []:
        try:
            manifest.read(step).check_sizes()
        except manifest.Damaged:
            continue
        return True
    return False


def _plan(arguments: list[str]) -> int:
    for key, value in prepare(cli.load(arguments)).items():
        print(f"{key}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        del sys.argv[1]
        cli.exit_with(_plan)
    become_train("slurm")
