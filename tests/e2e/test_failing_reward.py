"""A reward that breaks in the middle of a run: the cause is the last line, no step is lost, the run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REWARD = '''
"""Scores by length, and fails once the file beside it exists. Makes it after `LIMIT` calls."""

import os
from pathlib import Path

STOP, CALLS, LIMIT = Path(__file__).with_name("stop"), Path(__file__).with_name("calls"), 300


def length(prompt, completions, prompt_ids, completion_ids, answer, **data):
    if STOP.exists():
        raise KeyError("no such entry")
    with CALLS.open("a") as calls:
        calls.write(".")
    if os.path.getsize(CALLS) > LIMIT and not Path(__file__).with_name("mended").exists():
        STOP.touch()
    return float(len(completions) % 5)
'''
OVERRIDES = (
    "+experiment=gsm8k_grpo", "rewards.functions=[breaking.length]", "train_dataset.batch_size=4",
    "gconfig.n_samples=4", "gconfig.max_new_tokens=16", "evaluator.every_steps=0", "evaluator.n_samples=1",
    "saver.every_steps=0", "total_train_steps=6", "algorithm.n_minibatches=1", f"actor.path={ROOT / 'assets/tiny'}",
)  # fmt: skip


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "megarl.train", *overrides],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_the_last_line_is_the_cause_and_the_last_step_is_saved(tmp_path: Path) -> None:
    (tmp_path / "breaking.py").write_text(REWARD)
    failed = train(tmp_path, *OVERRIDES, f"run_root={tmp_path / 'runs'}")
    assert failed.returncode == 1, failed.stderr
    cause = "breaking.length failed, KeyError: 'no such entry'"
    *warnings, last = failed.stderr.splitlines()
    assert cause in last
    assert last.startswith("megarl: ")
    assert [cause in line for line in warnings] == [True]
    (run,) = (tmp_path / "runs/gsm8k_grpo").glob("2*")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    done = max(steps)
    assert 1 <= done < 6
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    assert f"resume={run}" in "".join(failed.stdout.split())

    (tmp_path / "stop").unlink()
    (tmp_path / "mended").touch()
    resumed = train(tmp_path, *OVERRIDES, f"resume={run}")
    assert resumed.returncode == 0, resumed.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if step > 0] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_parameter_that_is_no_column_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "breaking.py").write_text(REWARD.replace("completion_ids, answer,", "completion_ids, solution,"))
    refused = train(tmp_path, *OVERRIDES, f"run_root={tmp_path / 'runs'}")
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "megarl: rewards.functions: breaking.length cannot be called with the data's columns answer, messages, "
        "prompt_id: missing a required argument: 'solution'; rename a column, give the parameter a default, or add "
        "**data"
    ]
    assert not (tmp_path / "runs").exists()
