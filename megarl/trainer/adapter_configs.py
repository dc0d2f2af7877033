"""Configurations of a job's adapters: the job's own, with the knobs that each sets for itself (`adapters.NAME`)."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from megarl import cli
from megarl.algorithms import algorithm_of, name_of
from megarl.config import Config
from megarl.knobs import UserError
from megarl.observe.run_folder import RunFolder
from megarl.trainer.checkpoints.manifest import step_folders
from megarl.trainer.saved_config import differences

# What an adapter may set for itself in a job that trains several; all else is the job's.
OF_AN_ADAPTER = (
    "seed", "total_train_steps", "algorithm", "gconfig", "data", "train_dataset", "valid_dataset", "curriculum",
    "rewards", "evaluator", "rollout",
    "actor.optimizer", "actor.temperature", "actor.lora.path", "actor.lora.dropout",
    "actor.lora.init_seed", "critic_optimizer",
)  # fmt: skip


def load_adapters(overrides: list[str], job: Config) -> dict[str, Config]:
    """Composes and checks the configuration of each adapter of a job, by name: the command line's, with its own knobs.

    Raises:
        UserError: as `load`, naming the adapter; or it sets a knob that all adapters share.
    """
    # Knobs that copy `seed` and are the job's: of the base and of the servers.
    shared = [f"actor.init_seed={job.actor.init_seed}", f"server.random_seed={job.server.random_seed}"]
    configs = {}
    for name, own in job.adapters.items():
        resume = []
        if job.resume:  # an adapter without a checkpoint begins anew
            folder = RunFolder(Path(job.resume)).adapter(name)
            resume = [f"resume={folder.path if step_folders(folder.checkpoints) else 'null'}"]
        try:
            config = cli.load([*overrides, *own, *shared, f"experiment_name={name}", *resume])
            check_shared(job, config)
        except UserError as error:
            raise UserError(f"adapters.{name}: {error}") from error
        configs[name] = config
    return configs


def check_shared(job: Config, config: Config) -> None:
    """Refuses a knob of an adapter that differs from the job's and that all adapters share."""
    changed = differences(OmegaConf.structured(job), OmegaConf.structured(config))
    for knob, (before, now) in changed.items():
        if knob != "experiment_name" and not any(f"{knob}.".startswith(f"{own}.") for own in OF_AN_ADAPTER):
            raise UserError(
                f"{knob}={now} is not the job's ({before}), and all adapters share it: the base, the layout and the "
                "servers are one; set it for the job"
            )
    if algorithm_of(config.algorithm).needs_teacher:
        raise UserError(
            f"algorithm={name_of(config.algorithm)} has a teacher, which several adapters cannot share; train it in a "
            "run of its own"
        )
