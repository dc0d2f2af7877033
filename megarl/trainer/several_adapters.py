"""Trains several adapters of one frozen model at once, each by its own algorithm on its own data.

The adapters take their steps in turn, and one sync brings all of them to the servers:

    math: batch, update -> code: batch, update -> all adapters to the servers, proven equal -> math: ...

Meanwhile the servers sample for all of them. An adapter whose steps are done leaves the round. Each has a run of its
own in RUN/adapters/NAME, with metrics, checkpoints and PEFT's files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megarl.actor.engine import MegatronEngine
from megarl.actor.weights.hf_weights import Shard
from megarl.algorithms import algorithm_of
from megarl.config import Config
from megarl.families.adapters import is_adapter, wire_name
from megarl.observe.metrics import stats_tracker
from megarl.observe.progress import print_wrapped
from megarl.observe.run_folder import RunFolder
from megarl.rollout.executor import NoSamplesError
from megarl.trainer import rl
from megarl.trainer.inputs import Inputs
from megarl.trainer.rollouts.rollout_driver import RolloutDriver
from megarl.trainer.rollouts.weight_sync import WeightSync
from megarl.trainer.run import Run, stage
from megarl.trainer.stop_signal import StopSignal


class AllAdapters:
    """Weights of all adapters and of the base that they share, as a session pushes them."""

    def __init__(self, engines: Mapping[str, MegatronEngine]) -> None:
        self._engines = engines

    def shards(self) -> list[Shard]:
        """Lists the base's boxes on this rank, then each adapter's under its name on the servers. A collective."""
        base: list[Shard] = []
        adapters: list[Shard] = []
        for name, engine in self._engines.items():
            shards = engine.shards()
            base = base or [shard for shard in shards if not is_adapter(shard.name)]
            adapters += [replace(shard, name=wire_name(name, shard.name)) for shard in shards if is_adapter(shard.name)]
        return [*base, *adapters]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Raises UserError: whole tensors of the base carry no adapters (`EngineWeights.named`)."""
        return next(iter(self._engines.values())).named_weights()


class Learner:
    """One adapter's part of a job: its rollouts, its models and its run."""

    def __init__(self, name: str, config: Config, folder: RunFolder, inputs: Inputs, weights: WeightSync) -> None:
        self.name, self._config, self._folder, self._weights = name, config, folder, weights
        self._algorithm = algorithm_of(config.algorithm)
        self._open = contextlib.ExitStack()
        self.rollouts = self._open.enter_context(RolloutDriver(config, folder, inputs, self._algorithm, weights))
        if inputs.train is not None:
            self.rollouts.rank0.engine.adapter = name
        self.models: rl.Models
        self.run: Run

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def build(self, base: MegatronEngine | None, started: float, stop: StopSignal) -> None:
        """Builds the models on the frozen model of `base`, and begins or resumes the run."""
        self.models = rl.Models.build(self._config, self._algorithm, base=base)
        parts = {"rollouts": self.rollouts}
        self.run = Run(self._config, self._folder, self.models.saved, parts, started, stop)
        self._open.enter_context(self.run)

    def log_taken(self) -> None:
        """Logs a step whose update is taken, when another adapter ends the job before the step does."""
        with stats_tracker.ledger(self.name):
            self.run.log_taken()

    def finish(self) -> None:
        """Writes what a finished run leaves, and ends its sampling."""
        self.run.note(f"adapter   {self.name}")
        self.run.finish()
        if lost := self.rollouts.lost_episodes():
            print_wrapped(lost)
        self._weights.dismiss(self.rollouts)
        self._open.close()


def train(
    config: Config, configs: Mapping[str, Config], folder: RunFolder, inputs: Mapping[str, Inputs], started: float
) -> None:
    """Trains the adapters of the job `config`. `configs` and `inputs` have each one's, by name."""
    is_rank0 = next(iter(inputs.values())).train is not None
    stats_tracker.export()  # drops numbers left by an earlier run of this process
    with contextlib.ExitStack() as opened:
        weights = opened.enter_context(WeightSync(config, folder, is_rank0))
        if is_rank0:
            weights.note = functools.partial(print, flush=True)
        learners: list[Learner] = []
        for name, own in configs.items():
            with stats_tracker.ledger(name):
                learner = Learner(name, own, folder.adapter(name), inputs[name], weights)
                learners.append(opened.enter_context(learner))
        weights.start()
        stop = StopSignal(weights.note)
        base: MegatronEngine | None = None
        for learner in learners:
            with stats_tracker.ledger(learner.name):
                learner.build(base, started, stop)
            base = base or learner.models.actor
        opened.enter_context(stop)
        _connect(learners, weights)
        _take_turns(learners, weights)
        for learner in reversed(learners):
            learner.models.destroy()


def _connect(learners: Sequence[Learner], weights: WeightSync) -> None:
    """Connects the sync and all rollouts, and brings the servers to the adapters if they hold others."""
    source = AllAdapters({learner.name: learner.models.actor for learner in learners})
    done = max(learner.run.done for learner in learners)
    as_served = all(learner.models.actor.config.lora.starts_as_checkpoint for learner in learners)
    weights.connect(source, done, (), as_served)
    for learner in learners:
        with stats_tracker.ledger(learner.name):
            learner.rollouts.connect(learner.models.actor, learner.run.done)
    if weights.outdated:
        weights.push(weights.version)


def _take_turns(learners: Sequence[Learner], weights: WeightSync) -> None:
    """Has each adapter take a step, then syncs all, until every adapter has taken its own number of steps."""
    turns = {learner: rl.steps(learner.run, learner.rollouts, learner.models) for learner in learners}
    while turns:
        taken: set[Learner] = set()
        try:
            for learner, turn in turns.items():
                with stats_tracker.ledger(learner.name):
                    for _ in itertools.islice(turn, 1):
                        taken.add(learner)
        except NoSamplesError:  # ends the job, and every run saves its last step
            for learner in turns:
                learner.log_taken()
            raise
        for learner in [learner for learner in turns if learner not in taken]:
            with stats_tracker.ledger(learner.name):
                learner.finish()
            del turns[learner]
        if turns:
            with stage("weights"):
                weights.push(weights.version + 1)
            stats_tracker.hand_over(learner.name for learner in turns)
