"""The root of the configuration: which stage owns which knobs, and the checks that span stages.

Every knob lives in a frozen dataclass beside the code that reads it; this file only joins them. YAML in `configs/`
holds differences from the defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.algorithms import AlgorithmConfig, GRPOConfig, RLConfig, algorithm_of, name_of
from megarl.data.config import DataConfig, DatasetConfig
from megarl.knobs import UserError, knob
from megarl.launcher.config import ClusterConfig
from megarl.observe.logger import LoggerConfig
from megarl.parallel.config import ParallelConfig
from megarl.reshard.config import ReshardConfig
from megarl.rewards.pool import RewardConfig
from megarl.rollout.client.sglang_client import RolloutConfig
from megarl.rollout.evaluate import EvaluatorConfig
from megarl.rollout.servers.sglang_server import SGLangServerConfig
from megarl.trainer.checkpoints.saver import SaverConfig
from megarl.trainer.reference_logprobs import ReferenceConfig
from megarl.types import GenerationHyperparameters

LAUNCHERS = ("local", "slurm", "ray")


@dataclass(frozen=True)
class Config:
    """One run."""

    experiment_name: str = knob("unnamed", "name of the run's folder under run_root")
    method: str = knob("rl", "rl (rollouts and policy updates), sft (supervised) or preference (DPO and its kin)")
    seed: int = knob(1, "seed of the data order and of the sampling streams")
    total_train_steps: int = knob(100, "optimizer batches to train on; learning-rate schedules end there")
    run_root: str = knob("runs", "folder that run folders are made in")
    deterministic: bool = knob(
        False, "log-probs of rollout and trainer equal in every bit, or the run stops; method=rl on CPU, and slower"
    )
    resume: str | None = knob(None, "run folder to go on from, at its last checkpoint")
    launcher: str = knob("local", "what starts ranks and servers: local (this machine), slurm or ray")
    actor: EngineConfig = knob(factory=EngineConfig, meaning="the model that is trained")
    parallel: ParallelConfig = knob(factory=ParallelConfig, meaning="its layout over trainer ranks")
    algorithm: AlgorithmConfig = knob(factory=GRPOConfig, meaning="the algorithm, by its group: algorithm=dapo")
    critic_optimizer: OptimizerConfig = knob(factory=OptimizerConfig, meaning="Adam of PPO's critic")
    reference: ReferenceConfig = knob(factory=ReferenceConfig, meaning="the start policy of method=preference")
    gconfig: GenerationHyperparameters = knob(factory=GenerationHyperparameters, meaning="how completions are sampled")
    data: DataConfig = knob(factory=DataConfig, meaning="how the rows of all data sets are prepared")
    train_dataset: DatasetConfig = knob(factory=DatasetConfig, meaning="prompts, examples or preferences to train on")
    valid_dataset: DatasetConfig = knob(factory=DatasetConfig, meaning="held-out rows of the same kind")
    rollout: RolloutConfig = knob(factory=RolloutConfig, meaning="the client of the rollout servers")
    rewards: RewardConfig = knob(factory=RewardConfig, meaning="how completions are scored")
    server: SGLangServerConfig = knob(factory=SGLangServerConfig, meaning="the rollout servers of a run")
    sglang: dict[str, Any] = knob(
        factory=dict, meaning="SGLang's own server arguments, passed through: +sglang.NAME=VALUE"
    )
    reshard: ReshardConfig = knob(factory=ReshardConfig, meaning="weights from the trainer to the servers")
    saver: SaverConfig = knob(factory=SaverConfig, meaning="checkpoints of the run")
    evaluator: EvaluatorConfig = knob(factory=EvaluatorConfig, meaning="held-out evaluation during the run")
    logger: LoggerConfig = knob(factory=LoggerConfig, meaning="where metrics go")
    cluster: ClusterConfig = knob(factory=ClusterConfig, meaning="the machines that the run is planned for")


def check(config: Config) -> None:
    """The checks that need more than one stage's knobs; each stage checks its own.

    Raises:
        UserError: with both sides of the equation.
    """
    for one in checks(config):
        one(config)


def checks(config: Config) -> tuple[Callable[[Config], None], ...]:
    """The checks of this configuration, each for itself: `megarl.preflight` lists all that fail."""
    return (
        _check_run,
        _check_deterministic,
        *{"rl": RL_CHECKS, "preference": PREFERENCE_CHECKS}.get(config.method, ()),
    )


def _check_run(config: Config) -> None:
    if config.method not in ("rl", "sft", "preference"):
        raise UserError(f"method={config.method} must be rl, sft or preference")
    if config.launcher not in LAUNCHERS:
        near = difflib.get_close_matches(config.launcher, LAUNCHERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"launcher={config.launcher} does not exist; {hint}there are: {', '.join(LAUNCHERS)}")
    if config.total_train_steps < 1:
        raise UserError(f"total_train_steps={config.total_train_steps} must be at least 1")
    if config.actor.optimizer.warmup_steps >= config.total_train_steps:
        raise UserError(
            f"actor.optimizer.warmup_steps={config.actor.optimizer.warmup_steps} must be below total_train_steps="
            f"{config.total_train_steps}; lower one or raise the other"
        )
    config.actor.optimizer.check_length(config.total_train_steps)


def _check_deterministic(config: Config) -> None:
    if not config.deterministic:
        return
    if config.method != "rl":
        raise UserError(f"deterministic=true is about rollouts, which method={config.method} has none of; leave it out")
    if config.server.device == "cuda":
        raise UserError("deterministic=true holds on CPU only: set server.device=cpu, or deterministic=false")
    for name, only in (("dtype", "float32"), ("tp_size", 1), ("cpu_threads", 1)):
        if (value := getattr(config.server, name)) != only:
            raise UserError(f"server.{name}={value} must be {only} with deterministic=true; change one of them")


def _check_algorithm(config: Config) -> None:
    if not isinstance(config.algorithm, RLConfig):
        raise UserError(
            f"method=rl: algorithm={name_of(config.algorithm)} learns from preferences; choose one of rollouts, such "
            "as grpo, or method=preference"
        )
    config.algorithm.check()
    algorithm = algorithm_of(config.algorithm)
    if config.rollout.rollout_func and algorithm.workflow != "rlvr":
        raise UserError(
            f"rollout.rollout_func={config.rollout.rollout_func}: {type(algorithm).__name__} samples in a way of its "
            "own; choose another algorithm, or no function"
        )
    if config.gconfig.n_samples < algorithm.min_group:
        raise UserError(
            f"gconfig.n_samples={config.gconfig.n_samples}: {type(algorithm).__name__} compares the completions of a "
            f"prompt and needs at least {algorithm.min_group}"
        )


def _check_sampling(config: Config) -> None:
    if config.actor.init != "checkpoint":
        raise UserError(f"actor.init={config.actor.init} is for method=sft: the rollout servers load actor.path")
    if config.gconfig.greedy:
        raise UserError("gconfig.greedy=true: completions of a prompt would all be alike, and nothing learned; sample")
    if config.actor.temperature != config.gconfig.temperature:
        raise UserError(
            f"actor.temperature={config.actor.temperature} must equal gconfig.temperature="
            f"{config.gconfig.temperature}: the trainer's log-probs are compared with the rollout's"
        )


def _check_batch(config: Config) -> None:
    if not isinstance(config.algorithm, RLConfig):
        return
    prompts, samples, parts = config.train_dataset.batch_size, config.gconfig.n_samples, config.algorithm.n_minibatches
    if parts < 1:
        return  # the algorithm's own check says so
    if (prompts * samples) % parts:
        raise UserError(
            f"train_dataset.batch_size={prompts} x gconfig.n_samples={samples} = {prompts * samples} sequences do not "
            f"divide into algorithm.n_minibatches={parts}; make {parts} divide {prompts * samples}"
        )
    replicas = config.parallel.sizes()["dp_size"]
    if (prompts * samples // parts) % replicas:
        raise UserError(
            f"a minibatch has {prompts} x {samples} / {parts} = {prompts * samples // parts} sequences, which "
            f"parallel.dp_size={replicas} does not divide; change batch_size, n_samples or dp_size"
        )


def _check_deadlines(config: Config) -> None:
    if config.parallel.world_size() > 1 and config.parallel.timeout_s <= config.rollout.batch_timeout_s:
        raise UserError(
            f"parallel.timeout_s={config.parallel.timeout_s:g} must exceed rollout.batch_timeout_s="
            f"{config.rollout.batch_timeout_s:g}: the other ranks wait in a collective while rank 0 samples"
        )


def _check_tokens(config: Config) -> None:
    if config.train_dataset.max_length is None:
        return
    longest = config.train_dataset.max_length + config.gconfig.max_new_tokens
    if longest > config.actor.max_tokens_per_mb:
        raise UserError(
            f"train_dataset.max_length={config.train_dataset.max_length} + gconfig.max_new_tokens="
            f"{config.gconfig.max_new_tokens} = {longest} tokens do not fit into actor.max_tokens_per_mb="
            f"{config.actor.max_tokens_per_mb}; raise it to at least {longest}"
        )


def _check_preferences(config: Config) -> None:
    if isinstance(config.algorithm, RLConfig):
        raise UserError(
            f"method=preference: algorithm={name_of(config.algorithm)} learns from rollouts; choose one of "
            "preferences, such as dpo, or method=rl"
        )
    config.algorithm.check()
    rows, replicas = config.train_dataset.batch_size, config.parallel.sizes()["dp_size"]
    if rows % replicas:
        raise UserError(
            f"train_dataset.batch_size={rows} rows are not divided by parallel.dp_size={replicas}; a row's two "
            "sequences stay together, so change one of them"
        )


def _check_pair_tokens(config: Config) -> None:
    if config.train_dataset.max_length is None or isinstance(config.algorithm, RLConfig):
        return
    length, paired = config.train_dataset.max_length, algorithm_of(config.algorithm).paired
    if length * (1 + paired) > config.actor.max_tokens_per_mb:
        raise UserError(
            f"train_dataset.max_length={length}{' x 2 of a pair' if paired else ''} = {length * (1 + paired)} tokens "
            f"do not fit into actor.max_tokens_per_mb={config.actor.max_tokens_per_mb}; raise it to at least "
            f"{length * (1 + paired)}"
        )


PREFERENCE_CHECKS = (_check_preferences, _check_pair_tokens)
RL_CHECKS = (_check_algorithm, _check_sampling, _check_batch, _check_deadlines, _check_tokens)
