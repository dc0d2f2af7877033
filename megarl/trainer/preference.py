"""The training loop of preferences: DPO, IPO, KTO, ORPO, SimPO and the reward model.

pairs or judged completions -> the start policy's log-probs -> one loss over whole completions -> update
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from megarl.actor.api import FinetuneSpec, LossInput
from megarl.actor.critic import MegatronScalarEngine
from megarl.actor.engine import MegatronEngine
from megarl.actor.reference import start_policy
from megarl.algorithms import PreferenceAlgorithm, RewardModelConfig, algorithm_of
from megarl.algorithms.kto import mismatched_kl
from megarl.config import Config
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.trainer.checkpoints.saver import ACTOR
from megarl.trainer.inputs import Inputs
from megarl.trainer.reference_logprobs import Frozen, Logprobs, online, stored
from megarl.trainer.run import Run, stage
from megarl.types import PackedBatch


@dataclass
class Preferences:
    """The model, its algorithm, and the start policy's log-probs where the algorithm needs them."""

    engine: MegatronEngine
    algorithm: PreferenceAlgorithm
    loss_input: LossInput
    references: dict[str, Logprobs]  # by data set (train, valid); empty without a start policy

    @staticmethod
    def build(config: Config, inputs: Inputs) -> Preferences:
        algorithm = algorithm_of(config.algorithm)
        scores = isinstance(config.algorithm, RewardModelConfig)
        engine = (MegatronScalarEngine if scores else MegatronEngine)(config.actor, config.parallel)
        spec = FinetuneSpec(1, config.total_train_steps, 1)
        references: dict[str, Logprobs] = {}
        if config.actor.lora.rank:  # the start policy is the engine's own base
            engine.initialize(ft_spec=spec)
        if algorithm.needs_reference:
            references = references_of(config, inputs, engine)
        if not config.actor.lora.rank:  # once its log-probs are stored, the start policy's memory is free
            engine.initialize(ft_spec=spec)
        return Preferences(engine, algorithm, "values" if scores else "logprobs", references)

    def refer(self, batch: PackedBatch, data: str) -> PackedBatch:
        """Adds `ref_logp` to the batch, if the algorithm reads it."""
        if self.references:
            batch["ref_logp"] = self.references[data](batch)
        return batch

    def prepare(self, batch: PackedBatch) -> PackedBatch:
        """For KTO replaces the mismatched completions by their figures."""
        if "mismatched" not in batch:
            return batch
        mismatched = batch.select(batch["mismatched"].nonzero().flatten().tolist())
        batch = batch.select((~batch["mismatched"]).nonzero().flatten().tolist())
        logprobs = self.engine.eval().logprobs(mismatched, trained_only=True)
        kl = mismatched_kl(logprobs, mismatched["ref_logp"], mismatched)
        batch.set_sequences("kto_kl", torch.full((batch.num_seqs,), kl))
        share = float(batch["kto_label"].double().mean())
        batch.set_sequences("kto_desirable_share", torch.full((batch.num_seqs,), share))
        return batch

    def update(self, batch: PackedBatch) -> dict[str, float]:
        algorithm = self.algorithm
        stats = self.engine.train().train_batch(
            batch, algorithm.loss, algorithm.loss_weight, loss_input=self.loss_input
        )
        self.engine.step_lr_scheduler()
        return stats

    def evaluate(self, batch: PackedBatch) -> dict[str, float]:
        """Metrics of the held-out batch under the present weights."""
        batch, algorithm = self.prepare(self.refer(batch, "valid")), self.algorithm
        return self.engine.eval().eval_batch(batch, algorithm.loss, algorithm.loss_weight, loss_input=self.loss_input)


def references_of(config: Config, inputs: Inputs, engine: MegatronEngine) -> dict[str, Logprobs]:
    """The start policy's log-probs of both data sets. `engine` is initialized if it has adapters."""

    @functools.cache  # both data sets share the model
    def build() -> Frozen:
        return start_policy(config.actor, config.parallel, engine)

    if config.reference.mode == "online":
        return dict.fromkeys(("train", "valid"), online(build()))
    sets: dict[str, Any] = {"train": inputs.rows, "valid": inputs.valid}
    return {name: stored(config.actor, rows, inputs.pack, build) for name, rows in sets.items()}


def train(config: Config, folder: RunFolder, inputs: Inputs, started: float) -> None:
    """Trains the model on preferences and writes it as a HF checkpoint."""
    assert inputs.train is not None, "read_inputs gives every rank of such a run its data"
    preferences = Preferences.build(config, inputs)
    with Run(config, folder, {ACTOR: preferences.engine}, {"batches": inputs.train}, started) as run:
        if run.done == 0 and evaluate(run, preferences, inputs, 0):
            run.log(0)
        for step in run.steps():
            with stage("reference"):
                batch = preferences.refer(next(inputs.train), "train")
                run.keep_batch(step, batch)
                batch = preferences.prepare(batch)
            with stage("update"):
                stats = preferences.update(batch)
            with stats_tracker.scope("train"):
                stats_tracker.scalar(**stats, tokens=batch.total_tokens)
            evaluate(run, preferences, inputs, step)
            run.log(step)
        run.finish()
    preferences.engine.destroy()


def evaluate(run: Run, preferences: Preferences, inputs: Inputs, step: int) -> bool:
    """Measures the held-out data if due after `step`. Returns True if it was."""
    if not run.config.evaluator.is_due(step, run.config.total_train_steps):
        return False
    with stage("evaluate"), stats_tracker.scope("eval"):
        stats = preferences.evaluate(inputs.pack(list(inputs.valid)))
        stats_tracker.scalar(**stats)
    when = "before" if step == 0 else "after"
    run.facts.update({f"{name}_{when}": stats[name] for name in ("accuracy", "margin")})
    run.facts.update(accuracy_problems=len(inputs.valid))
    return True
