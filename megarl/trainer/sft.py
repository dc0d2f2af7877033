"""The training loop of supervised fine-tuning."""

from __future__ import annotations

from megarl.actor.api import FinetuneSpec
from megarl.actor.supervised import MegatronLMEngine
from megarl.config import Config
from megarl.data.collate import pad_sequences_to_tensors
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.trainer.checkpoints.saver import ACTOR
from megarl.trainer.inputs import Inputs
from megarl.trainer.run import Run, stage


def train(config: Config, folder: RunFolder, inputs: Inputs, started: float) -> None:
    """Trains the model on the examples and writes it as a HF checkpoint."""
    assert inputs.train is not None, "read_inputs gives every rank of a supervised run its data"
    held_out = pad_sequences_to_tensors(list(inputs.valid))
    engine = MegatronLMEngine(config.actor, config.parallel)
    engine.initialize(ft_spec=FinetuneSpec(1, config.total_train_steps, 1))
    with Run(config, folder, {ACTOR: engine}, {"batches": inputs.train}, started) as run:
        for step in run.steps():
            batch = next(inputs.train)
            with stage("update"):
                stats = engine.train_lm(batch)
                engine.step_lr_scheduler()
            with stats_tracker.scope("train"):
                stats_tracker.scalar(**stats, tokens=int(batch["attention_mask"].sum()))
            every = config.evaluator.every_steps
            if step == config.total_train_steps or (every and step % every == 0):
                with stage("evaluate"), stats_tracker.scope("eval"):
                    stats_tracker.scalar(**engine.evaluate_lm(held_out))
            run.log(step)
        run.finish()
    engine.destroy()
