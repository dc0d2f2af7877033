"""The training loop of supervised fine-tuning, on the data alone or with a teacher's distribution of its tokens."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megarl.actor.api import FinetuneSpec
from megarl.actor.supervised import MegatronLMEngine
from megarl.algorithms import OPDConfig, algorithm_of
from megarl.config import Config
from megarl.data.collate import pad_sequences_to_tensors
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.trainer.checkpoints.saver import ACTOR
from megarl.trainer.inputs import Inputs
from megarl.trainer.rollouts.teacher_servers import TeacherServers
from megarl.trainer.run import Run, stage
from megarl.trainer.teacher import Teacher
from megarl.types import PackedBatch


@dataclass
class Pupil:
    """A model that learns the data's tokens as its teacher would continue them (`algorithm=opd`)."""

    engine: MegatronLMEngine
    algorithm: Any
    teacher: Teacher

    def _scored(self, data: Any) -> tuple[Any, ...]:
        assert self.teacher.loss_source is not None, "teacher_checks.py"
        batch = PackedBatch.from_padded(data)
        batch.shared = True  # every rank reads the same rows
        self.teacher.score(batch)
        return batch, self.algorithm.data_loss, _trained_tokens, self.teacher.loss_source

    def train_lm(self, data: Any) -> dict[str, float]:
        """Takes one step on the data. See `TrainEngine.train_batch`."""
        scored = self._scored(data)
        return self.engine.train().train_batch(*scored)

    def evaluate_lm(self, data: Any) -> dict[str, float]:
        """Computes the loss of `train_lm` without a step."""
        scored = self._scored(data)
        return self.engine.eval().eval_batch(*scored)


def _trained_tokens(data: PackedBatch) -> Tensor:
    """Weight of a microbatch in the mean over the batch's trained tokens."""
    return data["loss_mask"].sum()


def train(config: Config, folder: RunFolder, inputs: Inputs, started: float) -> None:
    """Trains the model on the examples and writes it as a HF checkpoint."""
    assert inputs.train is not None, "read_inputs gives every rank of a supervised run its data"
    held_out = pad_sequences_to_tensors(list(inputs.valid))
    engine = MegatronLMEngine(config.actor, config.parallel)
    engine.initialize(ft_spec=FinetuneSpec(1, config.total_train_steps, 1))
    with contextlib.ExitStack() as opened:
        learner = _with_teacher(config, folder, engine, opened)
        with Run(config, folder, {ACTOR: engine}, {"batches": inputs.train}, started) as run:
            for step in run.steps():
                batch = next(inputs.train)
                run.keep_batch(step, batch)
                with stage("update"):
                    stats = learner.train_lm(batch)
                    engine.step_lr_scheduler()
                with stats_tracker.scope("train"):
                    stats_tracker.scalar(**stats, tokens=int(batch["attention_mask"].sum()))
                every = config.evaluator.every_steps
                if step == config.total_train_steps or (every and step % every == 0):
                    with stage("evaluate"), stats_tracker.scope("eval"):
                        stats_tracker.scalar(**learner.evaluate_lm(held_out))
                run.log(step)
            run.finish()
        if isinstance(learner, Pupil):
            learner.teacher.destroy()
    engine.destroy()


def _with_teacher(
    config: Config, folder: RunFolder, engine: MegatronLMEngine, opened: contextlib.ExitStack
) -> MegatronLMEngine | Pupil:
    """The engine itself, or a `Pupil` with `algorithm=opd`. What it starts ends with `opened`."""
    if not isinstance(config.algorithm, OPDConfig):
        return engine
    scorer = None
    if config.teacher.source == "server" and engine.groups.rank == 0:
        servers = TeacherServers(config, folder.logs)
        opened.callback(servers.close)
        servers.connect()
        scorer = servers.scorer()
    return Pupil(engine, algorithm_of(config.algorithm), Teacher(config, engine, scorer))
