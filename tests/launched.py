"""One supervised run that every launcher is held to: two ranks, three steps, the losses to the bit."""

from __future__ import annotations

from pathlib import Path

from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from tests.e2e.test_main_job import Command

STEPS = 3
ARGUMENTS = (
    *("+experiment=gsm8k_sft", "parallel=dp2", "train_dataset.batch_size=4", "evaluator.every_steps=0"),
    *("actor.optimizer.lr_decay_style=constant", "saver.export_hf=false", "logger.tensorboard=false"),
)


def losses(run: RunFolder) -> list[float]:
    """The losses of the first steps that are there."""
    return [row["train/loss"] for row in read_metrics(run.metrics)[:STEPS]] if run.metrics.exists() else []


def losses_of_the_local_launcher(root: Path) -> list[float]:
    """Runs it on this machine, without a cluster."""
    command = Command(root, *ARGUMENTS, f"total_train_steps={STEPS}")
    assert command.wait() == 0, command.output.read_text()[-3000:]
    return losses(RunFolder(root / "gsm8k_sft" / "latest"))
