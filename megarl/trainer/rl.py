"""Reinforcement learning: the loop.

prompts -> rollouts -> log-probs -> advantages -> update -> weights to the servers, proven equal -> next prompts
"""

from __future__ import annotations

from megarl.actor.api import FinetuneSpec
from megarl.actor.policy import MegatronPPOActor, rollout_mismatch
from megarl.algorithms import algorithm_of
from megarl.config import Config
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.trainer.read import Inputs
from megarl.trainer.recover import ACTOR
from megarl.trainer.rollouts import Rollouts
from megarl.trainer.run import Run, stage


def train(config: Config, folder: RunFolder, inputs: Inputs, started: float) -> None:
    """Trains the actor on its own completions."""
    algorithm = algorithm_of(config.algorithm)
    with Rollouts(config, folder, inputs) as rollouts:
        actor = MegatronPPOActor(config.actor, algorithm, config.parallel)
        actor.initialize(ft_spec=FinetuneSpec(1, config.total_train_steps, 1))
        with Run(config, folder, {ACTOR: actor}, {"batches": inputs.train}, started) as run:
            rollouts.connect(run.done)
            if run.done:
                rollouts.push(actor, run.done)  # the servers loaded the checkpoint that the run began with
            loop(run, rollouts, actor)
            run.finish()
        actor.destroy()


def loop(run: Run, rollouts: Rollouts, actor: MegatronPPOActor) -> None:
    """All steps that are left."""
    if "accuracy_before" not in run.facts and run.done == 0 and (found := rollouts.evaluate(0)):
        run.facts.update(accuracy_before=found["accuracy"], accuracy_problems=found["problems"])
        run.log(0)
    for step in run.steps():
        with stage("rollout"):
            batch = rollouts.next_batch()
        with stage("logprobs"):
            batch["prox_logp"] = actor.compute_logp(batch)
            rollouts.check_logprobs(batch)
        with stage("advantages"):
            actor.compute_advantages(batch)
        with stage("update"):
            stats = actor.ppo_update(batch)
            actor.step_lr_scheduler()
        with stage("weights"):
            rollouts.push(actor, version=step)
        with stats_tracker.scope("train"):
            stats_tracker.scalar(**stats, **rollout_mismatch(batch), tokens=batch.total_tokens)
        if found := rollouts.evaluate(step):
            run.facts.update(
                accuracy_after=found["accuracy"],
                accuracy_after_step=step,
                accuracy_problems=found["problems"],
                accuracy_samples=found["samples"],
            )
        run.log(step)
