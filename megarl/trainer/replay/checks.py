"""The configuration of a replayed step, and its checks against the kept batch, the checkpoint and this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megarl import cli
from megarl.actor.checkpoint.stored_state import check_facts
from megarl.actor.trait_checks import trained_model
from megarl.actor.weights.adapter_shards import shape_of
from megarl.algorithms import RewardModelConfig, RLConfig, algorithm_of, name_of
from megarl.checks import kernel_checks, machine_checks, size_checks
from megarl.config import Config
from megarl.families import as_scalar, read_config, with_adapters
from megarl.knobs import UserError, run_all
from megarl.parallel import platform
from megarl.rollout.servers.gpu_placement import check_gpu_count
from megarl.rollout.servers.server_config import gpu_count
from megarl.trainer.checkpoints.saver import ACTOR
from megarl.trainer.replay.kept_batches import Facts
from megarl.trainer.saved_config import differences
from megarl.types import PackedBatch

ABSENT = "the step's batch lacks {}, which algorithm={} reads; choose another algorithm"


def overrides_of(facts: Facts, changes: Sequence[str] = ()) -> list[str]:
    """Overrides of a step's configuration with changes. Another algorithm or layout comes with its own defaults.

    Raises:
        UserError: a group that has no part in a step.
    """
    groups = {key: value for key, _, value in (change.partition("=") for change in changes) if key in cli.groups()}
    if other := sorted(set(groups) - {"algorithm", "parallel"}):
        raise UserError(f"{other[0]}={groups[other[0]]}: a replay takes the groups algorithm and parallel, and knobs")
    values = {key: value for key, value in facts.config.items() if key not in groups}
    if groups.get("algorithm") == facts.algorithm:
        values["algorithm"] = facts.config["algorithm"]
    chosen = {"algorithm": facts.algorithm, **groups}
    knobs = [change for change in changes if change.partition("=")[0] not in groups]
    return [*(f"{group}={name}" for group, name in chosen.items()), *cli.overrides_of(values), "launcher=local", *knobs]


def changed_knobs(one: Config, other: Config) -> list[str]:
    """Knobs that differ between the run's step and the replayed one, as `KNOB=VALUE`."""
    before, after = (OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(config))) for config in (one, other))
    changed = [f"{name}={now}" for name, (_, now) in differences(before, after).items() if name != "launcher"]
    if name_of(one.algorithm) != name_of(other.algorithm):
        knobs = [change for change in changed if not change.startswith("algorithm.")]
        changed = [f"algorithm={name_of(other.algorithm)}", *knobs]
    return changed


def check_replay(run: Config, config: Config, batch: PackedBatch, checkpoint: Path | None) -> None:
    """Refuses a configuration that the batch, the checkpoint or this machine does not fit.

    Raises:
        UserError: naming what is missing.
    """
    if config.method != run.method:
        raise UserError(f"method={config.method}: the step's batch is one of method={run.method}; leave method out")
    _check_algorithm(run, config, batch, checkpoint)
    run_all(machine_checks(config))
    model = trained_model(config.actor, read_config(config.actor.path))
    run_all([*size_checks(config, model), *kernel_checks(config, model)])
    if platform.has_gpu():
        run_all([partial(check_gpu_count, gpu_count(), config.parallel.world_size(), 0, 1, False)])
    if checkpoint is not None:
        trained = as_scalar(model) if isinstance(config.algorithm, RewardModelConfig) else model
        adapters = shape_of(config.actor.lora)
        check_facts(
            checkpoint / ACTOR, trained if adapters is None else with_adapters(trained, adapters), config.actor.dtype
        )


def _check_algorithm(run: Config, config: Config, batch: PackedBatch, checkpoint: Path | None) -> None:
    """Refuses an algorithm that reads what neither the batch nor the checkpoint has."""
    name = name_of(config.algorithm)
    if config.method == "sft":
        if config.teacher.source != "none":
            raise UserError(f"teacher.source={config.teacher.source}: steps of SFT with a teacher cannot be replayed")
        return
    algorithm: Any = algorithm_of(config.algorithm)
    if isinstance(config.algorithm, RLConfig):
        if config.teacher.source == "server":
            raise UserError("teacher.source=server: a replay starts no servers; give teacher.source=trainer")
        ran: Any = algorithm_of(run.algorithm)
        if algorithm.workflow != ran.workflow:
            raise UserError(
                f"algorithm={name} learns from samples of the workflow {algorithm.workflow}, the step's are of "
                f"{ran.workflow}; choose another algorithm"
            )
        if name == "gdpo" and "reward_columns" not in batch:
            raise UserError(ABSENT.format("reward_columns", name))
        sizes = batch.of_samples("group_ids").unique(return_counts=True)[1]
        if int(sizes.max()) < algorithm.min_group:
            raise UserError(
                f"algorithm={name} compares at least {algorithm.min_group} completions of a prompt, and the step has "
                f"{int(sizes.max())}; choose another algorithm"
            )
        if batch.num_samples < config.algorithm.n_minibatches:
            raise UserError(
                f"algorithm.n_minibatches={config.algorithm.n_minibatches} is above the {batch.num_samples} samples of "
                "the step; lower it"
            )
        if algorithm.needs_critic and checkpoint is not None and not (checkpoint / "critic").is_dir():
            raise UserError(f"algorithm={name} needs a critic, which {checkpoint} lacks; choose one without")
    else:
        needed = ["kto_label" if name == "kto" else "is_chosen", *["ref_logp"] * algorithm.needs_reference]
        if missing := [key for key in needed if key not in batch]:
            raise UserError(ABSENT.format(" and ".join(missing), name))
