import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.knobs import UserError
from megarl.observe.logger import LoggerConfig, StatsLogger, read_metrics, replace_text

JSONL_ONLY = LoggerConfig(tensorboard=False)


def log_steps(run_dir: Path, steps: range, after_step: int = -1, loss: float = 1.0) -> None:
    with StatsLogger(run_dir, JSONL_ONLY, after_step=after_step) as logger:
        for step in steps:
            logger.commit(step, {"loss": loss})


def test_a_step_is_readable_as_soon_as_commit_returns(tmp_path: Path):
    logger = StatsLogger(tmp_path, JSONL_ONLY)
    logger.commit(1, {"loss": 0.25, "tokens": 7})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    logger.close()
    assert [(row["step"], row["loss"], row["tokens"]) for row in rows] == [(1, 0.25, 7)]
    assert rows[0]["time"] > 1.7e9


def test_a_resumed_run_has_each_step_once_and_keeps_the_replaced_ones(tmp_path: Path):
    log_steps(tmp_path, range(6), loss=1.0)
    log_steps(tmp_path, range(4, 8), after_step=3, loss=2.0)
    log_steps(tmp_path, range(7, 9), after_step=6, loss=3.0)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(s, 1.0 + (s > 3) + (s > 6)) for s in range(9)]
    replaced = read_metrics(tmp_path / "metrics.superseded.jsonl")
    assert [(row["step"], row["loss"]) for row in replaced] == [(4, 1.0), (5, 1.0), (7, 2.0)]


def test_a_line_truncated_by_a_crash_does_not_damage_the_next(tmp_path: Path):
    log_steps(tmp_path, range(3))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(metrics)] == [0, 1, 2]
    log_steps(tmp_path, range(3, 5), after_step=2)
    assert [row["step"] for row in read_metrics(metrics)] == [0, 1, 2, 3, 4]
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == '{"step": 3, "lo\n'


def test_a_whole_line_that_lacks_only_its_line_end_is_kept(tmp_path: Path):
    log_steps(tmp_path, range(2))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rstrip("\n"))
    log_steps(tmp_path, range(2, 3), after_step=1)
    assert [row["step"] for row in read_metrics(metrics)] == [0, 1, 2]


def test_steps_must_rise_also_across_a_resume(tmp_path: Path):
    log_steps(tmp_path, range(5))
    with StatsLogger(tmp_path, JSONL_ONLY, after_step=4) as logger:
        with pytest.raises(ValueError, match="step 4 was logged before"):
            logger.commit(4, {"loss": 1.0})
        with pytest.raises(ValueError, match="cannot be named 'time'"):
            logger.commit(5, {"time": 1.0})


def test_non_finite_values_are_strict_json_and_are_read_back(tmp_path: Path):
    with StatsLogger(tmp_path, JSONL_ONLY) as logger:
        logger.commit(0, {"loss": math.nan, "norm": math.inf, "low": -math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(row["loss"])
    assert (row["norm"], row["low"]) == (math.inf, -math.inf)


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a step's metrics"):
        read_metrics(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_metrics(tmp_path / "absent.jsonl")


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path):
    for steps, after_step, loss in ((range(5), -1, 1.0), (range(3, 6), 2, 2.0)):
        with StatsLogger(tmp_path, LoggerConfig(), after_step=after_step) as logger:
            for step in steps:
                logger.commit(step, {"train/loss": loss})
        ended = int(time.time())
        while int(time.time()) == ended:  # names of event files have seconds, and are read in their order
            time.sleep(0.05)
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


FULL = """
import resource
import sys
from pathlib import Path
from megarl.observe.logger import LoggerConfig, StatsLogger

logger = StatsLogger(Path(sys.argv[1]), LoggerConfig())
logger.commit(1, {"reward": 0.5})
(events,) = Path(sys.argv[1]).rglob("events.*")
resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size, resource.RLIM_INFINITY))
try:
    logger.commit(2, {"reward": 0.5})
except OSError as error:
    print(error.strerror)
"""


def test_an_event_file_that_cannot_grow_is_an_error_of_the_commit_and_no_traceback_of_a_thread(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.stdout == "File too large\n", done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("steps", [0, -2])
def test_a_line_covers_at_least_one_step(steps: int):
    with pytest.raises(UserError, match=f"logger.every_steps={steps} must be at least 1"):
        LoggerConfig(every_steps=steps)


def test_wandb_asked_for_but_not_installed_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        LoggerConfig(wandb=True)


def test_wandb_receives_the_steps_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="wandb is optional and not part of the pinned set-up")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = tmp_path / "runs" / "demo" / "now"
    run_dir.mkdir(parents=True)
    with StatsLogger(run_dir, LoggerConfig(tensorboard=False, wandb=True)) as logger:
        logger.commit(1, {"train/loss": 0.5})
    records = list((run_dir / "wandb").glob("offline-run-*/run-demo-now.wandb"))
    assert len(records) == 1
    assert b"train/loss" in records[0].read_bytes()


def test_a_file_is_replaced_atomically_without_leftovers(tmp_path: Path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "half\ud800")
    assert path.read_text() == "old"
    replace_text(path, "new")
    assert path.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["summary.json"]
