"""Runs with reshard.overlap_scoring=true: the next batch is scored while the servers receive the weights."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder, new_run
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.transfer.transports.gloo import GlooTransport
from megarl.rollout.evaluate import Evaluator
from megarl.trainer import rl
from megarl.trainer.inputs import read_inputs
from megarl.trainer.rollouts.rollout_driver import RolloutDriver
from tests.e2e.test_main_job import DEADLINE_S, Command, corrupt_second_message, steps_in

STEPS = 5
OVERRIDES = [
    "+experiment=gsm8k_grpo", "reshard.overlap_scoring=true", "rollout.max_head_offpolicyness=1",
    "train_dataset.batch_size=4", "algorithm.n_minibatches=2", "algorithm.kl_coef=0.01", "gconfig.max_new_tokens=24",
    "evaluator.at_start=false", "saver.export_hf=false",
]  # fmt: skip
ALONE = [*OVERRIDES, f"total_train_steps={STEPS}", "evaluator.every_steps=3", "evaluator.n_samples=1"]


def train(root: Path, *overrides: str) -> RunFolder:
    config = cli.load([*ALONE, *overrides])
    run = new_run(root, "beside")
    rl.train(config, run, read_inputs(config, rank=0), started=time.monotonic())
    return run


@contextmanager
def until_a_batch_is_sampled(driver: RolloutDriver) -> Iterator[None]:
    """Waits until the next batch is complete: a push then finds it, and scoring needs no answer of paused servers."""
    stream = driver.rank0.engine._stream
    assert stream is not None
    deadline = time.monotonic() + DEADLINE_S
    while len(stream._finished) < stream.batch_size:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield


def test_a_batch_is_scored_before_the_transfer_ends_and_updated_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message of each push beside a step waits until the next batch is scored; no clock decides."""
    begin_push, score, update, send = RolloutDriver.begin_push, rl.Models.score, rl.Models.update, GlooTransport.send
    scored, pushing = threading.Event(), threading.Event()
    events: list[str] = []

    def begin(driver: RolloutDriver, version: int) -> None:
        with until_a_batch_is_sampled(driver):
            scored.clear()
            pushing.set()
            events.append(f"push {version}")
            begin_push(driver, version)

    def scores(models: rl.Models, batch: Any) -> None:
        score(models, batch)
        events.append("score")
        scored.set()

    def updates(models: rl.Models, batch: Any) -> dict[str, float]:
        events.append("update")
        return update(models, batch)

    def sends(self: GlooTransport, *message: int) -> Any:
        if pushing.is_set():
            assert scored.wait(DEADLINE_S), "no batch was scored beside the push"
            pushing.clear()
            events.append("sent")
        return send(self, *message)

    monkeypatch.setattr(RolloutDriver, "begin_push", begin)
    monkeypatch.setattr(rl.Models, "score", scores)
    monkeypatch.setattr(rl.Models, "update", updates)
    monkeypatch.setattr(GlooTransport, "send", sends)
    run = train(tmp_path, "evaluator.every_steps=0")
    beside = list(itertools.chain(*([f"push {step}", "score", "sent", "update"] for step in range(1, STEPS))))
    assert events == ["score", "update", *beside]  # the last push has no batch after it
    rows = read_metrics(run.metrics)
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert json.loads(run.summary.read_text())["weights_verified"] == STEPS
    assert [row["rollout/staleness_max"] for row in rows] == [0, *[1] * (STEPS - 1)]


@pytest.mark.long
def test_an_evaluation_waits_for_the_weights_that_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushing: list[bool] = []
    on_rank0, evaluate = RolloutDriver._on_rank0, Evaluator.evaluate
    drivers: list[RolloutDriver] = []

    def ask(driver: RolloutDriver, work: Any) -> Any:
        drivers.append(driver)
        return on_rank0(driver, work)

    def measure(evaluator: Evaluator, *arguments: Any) -> Any:
        pushing.append(drivers[-1].weights.is_pushing)
        return evaluate(evaluator, *arguments)

    monkeypatch.setattr(RolloutDriver, "_on_rank0", ask)
    monkeypatch.setattr(Evaluator, "evaluate", measure)
    run = train(tmp_path)
    assert pushing == [False, False]
    summary = json.loads(run.summary.read_text())
    assert summary["weights_verified"] == summary["steps"] == STEPS
    lines = [json.loads(line) for path in sorted(run.path.glob("evaluations/*")) for line in path.open()]
    versions = {tuple(line["versions"]) for line in lines}
    assert versions == {(3,), (STEPS,)}


def test_a_tensor_corrupted_beside_scoring_stops_the_run_before_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupt_second_message(monkeypatch)
    config = cli.load(ALONE)
    run = new_run(tmp_path, "corrupted")
    with pytest.raises(WeightSyncError) as error:
        rl.train(config, run, read_inputs(config, rank=0), started=time.monotonic())
    assert error.value.tensor.startswith("model.")
    assert steps_in(run) == [1, 2]


@pytest.mark.long
def test_two_ranks_train_beside_their_syncs_and_stop_in_order(tmp_path: Path) -> None:
    command = Command(
        tmp_path, *OVERRIDES, "parallel.dp_size=2", "total_train_steps=1000", "evaluator.every_steps=0",
        "server.n_servers=1",
    )  # fmt: skip
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    command.wait_for(lambda: len(steps_in(run)) >= 4, "four steps")
    command.process.terminate()
    assert command.wait() == 0, command.output.read_text()[-3000:]
    rows = read_metrics(run.metrics)
    assert all(row["sync/verified"] == 1 for row in rows[1:])
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    assert max(row.get("train/logprob_diff_max", 0.0) for row in rows) <= 1e-3
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step_{len(rows):06d}"]
