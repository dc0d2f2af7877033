"""Lines of metrics that cover several steps: nothing is lost or counted twice, over evaluations, stops and resumes."""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megarl.config import Config, SaverConfig
from megarl.observe.logger import LoggerConfig, read_metrics
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder, RunTakenError
from megarl.trainer.checkpoints.saver import ACTOR
from megarl.trainer.run import Run
from megarl.trainer.run_owner import RunOwner


class Engine:
    """The parts of an engine that checkpoints need."""

    def snapshot_state(self) -> Engine:
        return self

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir()
        (folder / "weights").write_text("1")
        return [folder / "weights"]

    def load_state(self, folder: Path) -> None:
        assert (folder / "weights").is_file()


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    for path in (run.checkpoints, run.logs):
        path.mkdir(parents=True)
    return run


def seconds(step: int) -> float:
    return step / 4


def train(
    folder: RunFolder,
    every_steps: int,
    total: int = 8,
    checkpoints: int = 0,
    evaluations: tuple[int, ...] = (),
    resume: bool = False,
    after: Callable[[Run, int], None] = lambda run, step: None,
    logger: dict[str, Any] | None = None,
) -> None:
    """Runs steps with `step` as their loss, 10 * step tokens and step / 4 seconds of updates."""
    config = Config(
        total_train_steps=total,
        resume=str(folder.path) if resume else None,
        saver=SaverConfig(every_steps=checkpoints, asynchronous=False, export_hf=False),
        logger=LoggerConfig(every_steps=every_steps, tensorboard=False, **logger or {}),
    )
    with Run(config, folder, {ACTOR: Engine()}, {}, time.monotonic()) as run:  # type: ignore[dict-item]
        for step in run.steps():
            with stats_tracker.scope("train"):
                stats_tracker.scalar(loss=step, tokens=10 * step, logprob_diff_max=1 / step)
            with stats_tracker.scope("sync"):
                stats_tracker.scalar(verified=float(step != 2))
                stats_tracker.total(syncs=1)
            stats_tracker.total(**{"time_s/update": seconds(step)})
            if step in evaluations:
                stats_tracker.scalar(**{"eval/accuracy": 0.5})
            run.log(step)
            after(run, step)
        run.finish()


def expected(lines: list[int]) -> list[dict[str, float]]:
    """The lines that end at these steps."""
    rows = []
    for before, last in itertools.pairwise([0, *lines]):
        steps = range(before + 1, last + 1)
        total_s = sum(map(seconds, steps))
        rows.append(
            {
                "step": last,
                "time_s/update": total_s,
                "train/loss": sum(steps) / len(steps),
                "train/tokens": 10 * sum(steps) / len(steps),
                "train/logprob_diff_max": 1 / steps[0],
                "sync/verified": sum(step != 2 for step in steps) / len(steps),
                "sync/syncs": len(steps),
                "train/tokens_per_s": pytest.approx(10 * sum(steps) / total_s),
            }
        )
    return rows


def lines_of(folder: RunFolder) -> list[dict[str, Any]]:
    rows = read_metrics(folder.metrics)
    return [{name: row[name] for name in row if name not in ("time", "eval/accuracy")} for row in rows]


def test_every_step_has_a_line_by_default(folder: RunFolder) -> None:
    train(folder, LoggerConfig().every_steps)
    assert lines_of(folder) == expected([1, 2, 3, 4, 5, 6, 7, 8])


def test_a_line_covers_the_steps_since_the_line_before(folder: RunFolder) -> None:
    train(folder, 3)
    assert lines_of(folder) == expected([3, 6, 8])


def test_lines_end_at_evaluations_and_checkpoints_too(folder: RunFolder) -> None:
    train(folder, 3, evaluations=(4,), checkpoints=5)
    assert lines_of(folder) == expected([3, 4, 5, 6, 8])
    assert [row["step"] for row in read_metrics(folder.metrics) if "eval/accuracy" in row] == [4]


def test_a_resumed_run_shows_the_first_accuracy_of_all(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, 1, total=4, evaluations=(2,))
    folder.metrics.write_text(folder.metrics.read_text().replace('"eval/accuracy": 0.5', '"eval/accuracy": 0.25'))
    capsys.readouterr()
    train(folder, 1, evaluations=(6,), resume=True)
    shown = {line.split("/")[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")}
    assert list(shown) == ["step 5", "step 6", "step 7", "step 8"]
    assert "held-out accuracy 25.0% (step 2)" in shown["step 5"]
    assert "held-out accuracy 25.0% -> 50.0% (step 6)" in shown["step 6"]


def test_a_resumed_run_without_a_step_left_says_so(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, 1)
    train(folder, 1, total=10, resume=True)
    assert "no step is left" not in capsys.readouterr().out
    train(folder, 1, total=4, resume=True)
    said = "no step is left: step 10 is taken, total_train_steps=4; raise it"
    assert capsys.readouterr().out.splitlines()[0] == said


def test_progress_shows_each_step_with_its_own_numbers(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, 4)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(shown) == 8
    for step, line in enumerate(shown, 1):
        assert line.startswith(f"step {step}/8  loss {step:.4f}  train tokens/s 40  ")


def test_the_summary_counts_syncs_by_steps_and_keeps_the_largest_difference(folder: RunFolder) -> None:
    train(folder, 3)
    summary = json.loads(folder.summary.read_text())
    assert summary["weights_verified"] == 7  # all but step 2
    assert summary["max_rollout_train_logprob_diff"] == 1.0


def test_the_timeline_has_a_line_a_step_and_the_checkpoint_after_them(folder: RunFolder) -> None:
    train(folder, 3, total=4, checkpoints=2)
    lines = [json.loads(line) for line in (folder.timeline / "rank_0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert [[span[0] for span in line["spans"]] for line in lines] == [[], [], ["checkpoint"], [], ["checkpoint"]]


def test_steps_asked_for_are_profiled_on_the_way(folder: RunFolder) -> None:
    train(folder, 1, total=3, logger={"profile_from": 2})
    assert [path.name for path in folder.profiles.glob("*")] == ["rank_0.steps_2-2.json.gz"]


def test_a_run_that_is_stopped_writes_the_steps_since_its_last_line(folder: RunFolder) -> None:
    def stop(run: Run, step: int) -> None:
        run._stop.requested = step == 6

    train(folder, 4, after=stop)
    assert lines_of(folder) == expected([4, 6])
    train(folder, 4, resume=True)
    assert lines_of(folder) == expected([4, 6, 8])


def test_a_run_resumed_in_the_process_that_it_died_in_covers_every_step_once(folder: RunFolder) -> None:
    def die(run: Run, step: int) -> None:
        if step == 7:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(folder, 3, total=12, checkpoints=5, after=die)
    assert lines_of(folder) == expected([3, 5, 6])
    train(folder, 3, total=12, checkpoints=5, resume=True)
    assert lines_of(folder) == expected([3, 5, 6, 9, 10, 12])
    superseded = read_metrics(folder.metrics.with_suffix(".superseded.jsonl"))
    assert [row["step"] for row in superseded] == [6]


@pytest.mark.parametrize("every_steps", [1, 100])
def test_a_run_whose_folder_another_command_opened_ends_before_its_next_step(
    every_steps: int, folder: RunFolder
) -> None:
    taken = []

    def after(run: Run, step: int) -> None:
        taken.append(step)
        if step == 4:
            RunOwner(folder)

    with pytest.raises(RunTakenError, match="two commands cannot write one run"):
        train(folder, every_steps, after=after, checkpoints=3)
    assert taken == [1, 2, 3, 4]
    assert [row["step"] for row in read_metrics(folder.metrics)] == ([1, 2, 3, 4] if every_steps == 1 else [3])
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000003"]


def test_a_run_whose_folder_another_command_opened_in_a_step_writes_nothing_there(folder: RunFolder) -> None:
    config = Config(saver=SaverConfig(keep_batches=1, export_hf=False), logger=LoggerConfig(tensorboard=False))
    with Run(config, folder, {ACTOR: Engine()}, {}, time.monotonic()) as run:  # type: ignore[dict-item]
        RunOwner(folder)
        with pytest.raises(RunTakenError, match="two commands cannot write one run"):
            run.keep_batch(1, {})
        with pytest.raises(RunTakenError, match="two commands cannot write one run"):
            run.log(1)
    assert folder.metrics.read_text() == ""
    assert not folder.batches.exists() or not list(folder.batches.iterdir())
