"""An RL run that is killed and goes on from its checkpoint: given the same completions, the same bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from tests import warm
from tests.e2e.test_main_job import Command, steps_in

STEPS = 100  # neither run comes to its end
ARGUMENTS = [
    "+experiment=gsm8k_grpo", "evaluator.every_steps=0", "evaluator.at_start=false", "train_dataset.batch_size=4",
    "algorithm.n_minibatches=2", "gconfig.n_samples=4", "gconfig.max_new_tokens=24", "saver.export_hf=false",
    f"total_train_steps={STEPS}", "saver.every_steps=3", "saver.keep=9", "server.heartbeat_s=300",
]  # fmt: skip
# Wall times, and what the next step's completions record before or after a step is logged.
MEASURED = ("time", "tokens_per_s", "truncated", "canary_logprob")  # a canary is sampled anew, on no tape


class Taped(Command):
    """A run whose servers' completions are kept on a tape. Its imports are there already; its one rank is itself."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.output = root / f"output-{len(list(root.glob('output-*')))}.txt"
        command = [sys.executable, "-m", "tests.e2e.replay_worker", str(root / "tape.jsonl"), *arguments]
        with self.output.open("wb") as file:
            self.process: Any = warm.Popen(
                [*command, f"run_root={root}"], stdout=file, stderr=warm.STDOUT, start_new_session=True
            )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def exact(rows: list[dict[str, float]]) -> dict[int, dict[str, float]]:
    """What a step must be equal in, by step."""
    return {int(row["step"]): {k: v for k, v in row.items() if not any(word in k for word in MEASURED)} for row in rows}


def digests(checkpoint: Path) -> dict[str, Any]:
    """Size and SHA-256 of a checkpoint's files, but for the trainer's own, which holds wall times."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: facts for name, facts in files.items() if name != "trainer.json"}


@pytest.mark.long
def test_a_run_killed_and_resumed_does_the_same_steps_again_to_the_bit(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    first = Taped(tmp_path, *ARGUMENTS)
    try:
        first.wait_for(lambda: (run.checkpoints / "step_000006").is_dir(), "checkpoint of step 6")
    finally:
        first.kill()  # by SIGKILL
    undisturbed = exact(read_metrics(run.metrics))
    accounts = lines_of(run.path / "episodes.jsonl")
    for late in sorted(run.checkpoints.glob("step_*"))[1:]:
        late.rename(tmp_path / late.name)  # the run goes on from step 3

    second = Taped(tmp_path, *ARGUMENTS, f"resume={run.path}")
    enough = max(undisturbed)
    try:
        second.wait_for(
            lambda: max(steps_in(run)) >= enough and (run.checkpoints / "step_000006").is_dir(), "the same steps again"
        )
    finally:
        second.kill()
    assert steps_in(run) == list(range(1, len(steps_in(run)) + 1))
    again = exact(read_metrics(run.metrics))
    assert enough >= 6
    assert {step: again[step] for step in undisturbed} == undisturbed
    assert len({row["train/grad_norm"] for row in undisturbed.values()}) > 2  # a step without signal has 0
    found = digests(run.checkpoints / "step_000006")
    assert any("actor/" in name for name in found)
    assert found == digests(tmp_path / "step_000006")  # weights, moments, generators

    done = lines_of(run.path / "episodes.jsonl")
    assert [int(episode["prompt_id"]) for episode in done] == list(range(len(done)))
    both = min(len(done), len(accounts))
    assert done[:both] == accounts[:both]
    assert lines_of(run.path / "episodes.superseded.jsonl") == accounts[12:]
