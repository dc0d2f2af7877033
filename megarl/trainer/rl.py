"""Reinforcement learning: the loop.

prompts -> rollouts -> log-probs -> advantages -> update -> weights to the servers, proven equal -> next prompts
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megarl.actor.api import FinetuneSpec
from megarl.actor.critic import MegatronPPOCritic
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import MegatronPPOActor, rollout_mismatch
from megarl.actor.reference import MegatronReference
from megarl.algorithms import algorithm_of
from megarl.config import Config
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.trainer.checkpoints.saver import ACTOR
from megarl.trainer.inputs import Inputs
from megarl.trainer.rollout_driver import RolloutDriver
from megarl.trainer.run import Run, stage
from megarl.types import PackedBatch


@dataclass
class Models:
    """The policy, and what an algorithm may keep beside it."""

    actor: MegatronPPOActor
    reference: MegatronReference | None = None  # frozen at the start
    critic: MegatronPPOCritic | None = None

    @staticmethod
    def build(config: Config, algorithm: Any) -> Models:
        spec = FinetuneSpec(1, config.total_train_steps, 1)
        models = Models(MegatronPPOActor(config.actor, algorithm, config.parallel, deterministic=config.deterministic))
        models.actor.initialize(ft_spec=spec)
        if algorithm.needs_reference:
            models.reference = MegatronReference(config.actor, config.parallel)
            models.reference.initialize()
            models.reference.offload()
        if algorithm.needs_critic:
            critic = dataclasses.replace(config.actor, optimizer=config.critic_optimizer)
            models.critic = MegatronPPOCritic(critic, algorithm, config.parallel)
            models.critic.initialize(ft_spec=spec)
        return models

    @property
    def saved(self) -> dict[str, MegatronEngine]:
        """What checkpoints hold, by name. The reference is read from the start again."""
        return {ACTOR: self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def score(self, batch: PackedBatch) -> None:
        """Sets `prox_logp`, `ref_logp` and `values` of the batch, as far as they are read before the update.

        After the update `prox_logp` is there in any case.
        """
        unknown = "rollout_logprobs" not in batch  # the workflow could not know them: the trainer's stand in
        if unknown or self.actor.algorithm.needs_prox_logp:
            batch["prox_logp"] = self.actor.compute_logp(batch)
        if unknown:
            batch["rollout_logprobs"] = batch["prox_logp"].clone()
        if self.reference is not None:
            batch["ref_logp"] = self.reference.compute_logp(batch)
            self.reference.offload()
        if self.critic is not None:
            batch["values"] = self.critic.compute_values(batch)

    def update(self, batch: PackedBatch) -> dict[str, float]:
        """The step's figures; those of the critic begin with `critic_`."""
        stats = self.actor.ppo_update(batch)
        self.actor.step_lr_scheduler()
        if self.critic is not None:
            stats |= {f"critic_{name}": value for name, value in self.critic.ppo_update(batch).items()}
            self.critic.step_lr_scheduler()
        return stats

    def destroy(self) -> None:
        for model in (self.reference, self.critic, self.actor):
            if model is not None:
                model.destroy()


def train(config: Config, folder: RunFolder, inputs: Inputs, started: float) -> None:
    """Trains the actor on its own completions."""
    algorithm = algorithm_of(config.algorithm)
    with RolloutDriver(config, folder, inputs, algorithm) as rollouts:
        models = Models.build(config, algorithm)
        with Run(config, folder, models.saved, {"rollouts": rollouts}, started) as run:
            rollouts.connect(models.actor, run.done)
            if rollouts.outdated:
                rollouts.push(run.done)
            loop(run, rollouts, models)
            run.finish()
        models.destroy()


def loop(run: Run, rollouts: RolloutDriver, models: Models) -> None:
    """All steps that are left."""
    if "accuracy_before" not in run.facts and run.done == 0 and (found := rollouts.evaluate(0)):
        run.facts.update(accuracy_before=found["accuracy"], accuracy_problems=found["problems"])
        run.log(0)
    for step in run.steps():
        with stage("rollout"):
            batch = rollouts.next_batch()
        with stage("logprobs"):
            models.score(batch)
        with stage("advantages"):
            models.actor.compute_advantages(batch)
        with stage("update"):
            stats = models.update(batch)
            rollouts.check_logprobs(batch)  # before anything is made of the update: a sync, a checkpoint
            mismatch = rollout_mismatch(batch, rollouts.version)
        with stage("weights"):
            rollouts.push(version=step)
        with stats_tracker.scope("train"):
            stats_tracker.scalar(**stats, **mismatch, tokens=batch.total_tokens)
        if found := rollouts.evaluate(step):
            run.facts.update(
                accuracy_after=found["accuracy"],
                accuracy_after_step=step,
                accuracy_problems=found["problems"],
                accuracy_samples=found["samples"],
            )
        run.log(step)
