"""The training loop of reinforcement learning.

prompts -> rollouts -> log-probs -> advantages -> update -> weights to the servers, proven equal -> next prompts
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.actor.api import FinetuneSpec
from megarl.actor.critic import MegatronPPOCritic
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.reference import BasePolicy, MegatronReference, start_policy
from megarl.actor.rollout_mismatch import rollout_mismatch
from megarl.algorithms import Algorithm, algorithm_of
from megarl.config import Config
from megarl.observe.metrics import stats_tracker
from megarl.observe.progress import print_wrapped
from megarl.observe.run_folder import RunFolder
from megarl.reshard.quantised_weights import QuantisedWeights
from megarl.rollout.client.scoring import Scorer
from megarl.trainer.checkpoints.saver import ACTOR
from megarl.trainer.inputs import Inputs
from megarl.trainer.rollouts.rollout_driver import RolloutDriver
from megarl.trainer.rollouts.weight_sync import WeightSync
from megarl.trainer.run import Run, stage
from megarl.trainer.teacher import Teacher
from megarl.types import PackedBatch


@dataclass
class Models:
    """The policy, and the other models that an algorithm needs."""

    actor: MegatronPPOActor
    reference: MegatronReference | BasePolicy | None = None  # the start policy
    critic: MegatronPPOCritic | None = None
    teacher: Teacher | None = None

    @staticmethod
    def build(
        config: Config, algorithm: Any, scorer: Scorer | None = None, base: MegatronEngine | None = None
    ) -> Models:
        """Builds what the algorithm needs. Adapters are built on the frozen model of `base`, if there is one."""
        spec = FinetuneSpec(1, config.total_train_steps, 1)
        models = Models(MegatronPPOActor(config.actor, algorithm, config.parallel, deterministic=config.determinism))
        models.actor.initialize(ft_spec=spec, base=base)
        if config.server.quantization_aware:
            assert config.server.format is not None, "checked before the start"
            served = QuantisedWeights(models.actor, config.server.format, models.actor.groups.tp)
            models.actor.run_passes_in(served.rounded)
        if algorithm.needs_reference:
            models.reference = start_policy(config.actor, config.parallel, models.actor)
            models.reference.offload()
        if algorithm.needs_critic:
            critic = dataclasses.replace(config.actor, optimizer=config.critic_optimizer)
            models.critic = MegatronPPOCritic(critic, algorithm, config.parallel)
            models.critic.initialize(ft_spec=spec, base=models.actor if config.actor.lora.rank else None)
        if algorithm.needs_teacher:
            models.teacher = Teacher(config, models.actor, scorer)
            if models.teacher.loss_source is not None:
                models.actor.loss_input = models.teacher.loss_source
        return models

    @property
    def saved(self) -> dict[str, MegatronEngine]:
        """Engines that checkpoints hold, by name. A resume loads the reference from the start policy again."""
        return {ACTOR: self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def score(self, batch: PackedBatch) -> None:
        """Sets `prox_logp`, `ref_logp`, `values` and the teacher's figures, each only if it is read before the update.

        The update itself sets `prox_logp` if it is missing.
        """
        unknown = "rollout_logprobs" not in batch  # the workflow gives no log-probs: the trainer's replace them
        dropped = self.actor.config.lora.dropout > 0  # dropout changes the policy in the update's own forward pass
        if unknown or dropped or self.actor.algorithm.needs_prox_logp:
            batch["prox_logp"] = self.actor.compute_logp(batch)
        if unknown:
            batch["rollout_logprobs"] = batch["prox_logp"].clone()
        if self.reference is not None:
            batch["ref_logp"] = self.reference.compute_logp(batch)
            self.reference.offload()
        if self.critic is not None:
            batch["values"] = self.critic.compute_values(batch)
        if self.teacher is not None:
            self.teacher.score(batch)

    def update(self, batch: PackedBatch) -> dict[str, float]:
        """One update of policy and critic. Returns its metrics; the critic's begin with `critic_`."""
        stats = self.actor.ppo_update(batch)
        self.actor.step_lr_scheduler()
        if self.critic is not None:
            stats |= {f"critic_{name}": value for name, value in self.critic.ppo_update(batch).items()}
            self.critic.step_lr_scheduler()
        return stats

    def destroy(self) -> None:
        for model in (self.teacher, self.reference, self.critic, self.actor):
            if model is not None:
                model.destroy()


@contextlib.contextmanager
def rollouts_of(config: Config, folder: RunFolder, inputs: Inputs, algorithm: Algorithm) -> Iterator[RolloutDriver]:
    """The run's rollouts, on servers that load meanwhile. Connect its `weights` first, then itself."""
    with (
        WeightSync(config, folder, is_rank0=inputs.train is not None) as weights,
        RolloutDriver(config, folder, inputs, algorithm, weights) as rollouts,
    ):
        weights.start()
        yield rollouts


def train(config: Config, folder: RunFolder, inputs: Inputs, started: float) -> None:
    """Trains the actor on its own completions."""
    algorithm = algorithm_of(config.algorithm)
    with rollouts_of(config, folder, inputs, algorithm) as rollouts:
        weights = rollouts.weights
        models = Models.build(config, algorithm, rollouts.scorer)
        with Run(config, folder, models.saved, {"rollouts": rollouts}, started) as run:
            weights.note = run.note
            weights.connect(models.actor, run.done, list(models.saved.values()), config.actor.lora.starts_as_checkpoint)
            rollouts.connect(models.actor, run.done)
            run.before_save = weights.gpus.for_training
            if weights.outdated:
                rollouts.push(run.done)
            loop(run, rollouts, models)
            run.finish()
            if lost := rollouts.lost_episodes():
                print_wrapped(lost)
        models.destroy()


def loop(run: Run, rollouts: RolloutDriver, models: Models) -> None:
    """Runs the remaining steps. With reshard.overlap_scoring a step's weights travel while the next one is scored."""
    for step in steps(run, rollouts, models):
        is_last = step == run.config.total_train_steps
        push = rollouts.begin_push if run.config.reshard.overlap_scoring and not is_last else rollouts.push
        with stage("weights"):
            push(version=step)
    rollouts.end_push()  # of a run that was told to stop


def steps(run: Run, rollouts: RolloutDriver, models: Models) -> Iterator[int]:
    """Takes the remaining steps. Yields each one's number after its update, for its weights to reach the servers."""
    if "accuracy_before" not in run.facts and run.done == 0 and (evaluation := rollouts.evaluate(0)):
        run.facts.update(accuracy_before=evaluation["accuracy"], accuracy_problems=evaluation["problems"])
        run.log(0)
    for step in run.steps():
        with stage("rollout"):
            batch = rollouts.next_batch()
        run.keep_batch(step, batch)
        with stage("logprobs"):
            models.score(batch)
        with stage("advantages"):
            models.actor.compute_advantages(batch)
        if rollouts.weights.is_pushing:
            with stage("weights"):
                rollouts.end_push()  # the update changes them
        with stage("update"):
            stats = models.update(batch)
            rollouts.check_logprobs(batch)  # before the update reaches a server or a checkpoint
            mismatch = rollout_mismatch(batch, rollouts.version)
        run.taken(step)
        rollouts.taken()
        with stats_tracker.scope("train"):
            stats_tracker.scalar(**stats, **mismatch, tokens=batch.total_tokens)
        yield step
        if evaluation := rollouts.evaluate(step):
            run.facts.update(
                accuracy_after=evaluation["accuracy"],
                accuracy_after_step=step,
                accuracy_problems=evaluation["problems"],
                accuracy_samples=evaluation["samples"],
            )
        run.log(step)
