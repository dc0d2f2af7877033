"""Writes metrics to `metrics.jsonl`, TensorBoard event files and, if configured, wandb."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.knobs import MAX_COUNT, UserError, check_ranges, knob
from megarl.observe.run_folder import RunFolder

log = logging.getLogger(__name__)
RESERVED = ("step", "time")


@dataclass(frozen=True)
class LoggerConfig:
    """Destinations of metrics, besides `metrics.jsonl`, which is always written."""

    every_steps: int = knob(
        1,
        "steps a line of metrics covers: means are over them, sums (time_s/...) add up, *_max is their largest; lines "
        "also end at evaluations, checkpoints and the last step",
        least=1,
        most=MAX_COUNT,
    )
    samples_per_step: int = knob(
        8,
        "trained completions of each step kept with their text in samples.jsonl, evenly spread; 0 is none",
        least=0,
        most=100_000,
    )
    profile_from: int = knob(
        0,
        "first step that torch.profiler records, into profiles/ of the run folder, on every rank; 0 is none",
        least=0,
        most=MAX_COUNT,
    )
    profile_steps: int = knob(
        1, "steps that torch.profiler records; a trace holds some 100 MB a step", least=1, most=100
    )
    tensorboard: bool = knob(True, "write TensorBoard event files into the run folder")
    wandb: bool = knob(False, "send metrics to Weights & Biases too; needs the package wandb")
    wandb_project: str = knob("megarl", "the wandb project")

    def __post_init__(self) -> None:
        check_ranges(self, "logger")
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise UserError("logger.wandb=true needs the package wandb: pip install wandb, or set logger.wandb=false")

    def check_length(self, steps: int) -> None:
        """Refuses a range of profiled steps that a run of `steps` steps does not reach."""
        last = self.profile_from + self.profile_steps - 1
        if self.profile_from and last > steps:
            raise UserError(
                f"logger.profile_from={self.profile_from} and logger.profile_steps={self.profile_steps} end at step "
                f"{last}, after total_train_steps={steps}; begin earlier or record fewer steps"
            )


@functools.cache
def _leave_errors_to_flush() -> None:
    """Keeps the thread that writes TensorBoard's files from printing a traceback: the next flush raises its error."""
    report = threading.excepthook

    def report_others(arguments: Any) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            report(arguments)

    threading.excepthook = report_others


class StatsLogger:
    """Logs each step once, over any number of resumes. One process of a run has one.

    `after_step` is the last step that counts: a run resumed from the checkpoint of step 40 passes 40. Lines of later
    steps, which the run repeats, move to `metrics.superseded.jsonl`; TensorBoard hides them. A new run keeps the
    default.
    """

    def __init__(self, run_dir: Path, config: LoggerConfig, after_step: int = -1) -> None:
        run = RunFolder(Path(run_dir))
        self._last_step = keep_until(run.metrics, after_step)
        self._file = run.metrics.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            purge_step = None if after_step < 0 else after_step + 1
            _leave_errors_to_flush()
            self._tensorboard = SummaryWriter(str(run.tensorboard), purge_step=purge_step)
        if config.wandb:
            import wandb

            name = f"{run.path.parent.name}-{run.path.name}"
            self._wandb = wandb.init(
                project=config.wandb_project, name=name, id=name, resume="allow", dir=str(run.path)
            )

    def __enter__(self) -> StatsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(self, step: int, stats: Mapping[str, float]) -> None:
        """Writes the metrics of the steps up to `step`; the file holds them when this returns. Steps must rise."""
        if step <= self._last_step:
            raise ValueError(f"step {step} was logged before (the last one was {self._last_step}); steps must rise")
        if reserved := [key for key in RESERVED if key in stats]:
            raise ValueError(f"a metric cannot be named {reserved[0]!r}: each line has its own step and time")
        self._last_step = step
        self._file.write(json_line({"step": step, "time": round(time.time(), 3), **stats}) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for key, value in stats.items():
                self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(stats), step=step)

    def close(self) -> None:
        """Closes every file. May be called twice."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


def json_line(values: Mapping[str, Any]) -> str:
    """Strict JSON on one line. NaN and infinities, which JSON lacks, become "nan", "inf" and "-inf"."""
    plain = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    return json.dumps(plain, allow_nan=False)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads the lines of a `metrics.jsonl`, in order. Leaves out a last line that a crash cut off.

    Raises:
        UserError: the file cannot be read, or another line is damaged.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the metrics.jsonl of a run") from error
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        row = _parse(line)
        if row is None:
            raise UserError(f"{path}, line {number} is not a step's metrics: {line[:60]!r}; mend or remove the line")
        rows.append(row)
    return rows


def keep_until(path: Path, step: int) -> int:
    """Moves damaged lines and those after `step` to `metrics.superseded.jsonl`. Returns the last step kept, else -1."""
    if not path.exists():
        return -1
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if line]
    rows = [_parse(line) for line in lines]
    kept_lines = [line for line, row in zip(lines, rows, strict=True) if row is not None and row["step"] <= step]
    moved_lines = [line for line, row in zip(lines, rows, strict=True) if row is None or row["step"] > step]
    if moved_lines:
        superseded = path.with_suffix(".superseded.jsonl")
        with superseded.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in moved_lines)
        log.info("%d lines after step %d moved from %s to %s", len(moved_lines), step, path.name, superseded.name)
    if moved_lines or (text and not text.endswith("\n")):
        replace_text(path, "".join(f"{line}\n" for line in kept_lines))
    return max((int(row["step"]) for row in rows if row is not None and row["step"] <= step), default=-1)


def keep_lines(path: Path, count: int) -> None:
    """Moves the lines of a `.jsonl` file after the first `count` to its `.superseded.jsonl`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    if moved := lines[count:]:
        with path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(moved)
        replace_text(path, "".join(lines[:count]))


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader sees the old text or the new, never a part."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _parse(line: str) -> dict[str, float] | None:
    """Parses a line into numbers; None if it is damaged."""
    try:
        row = {key: value if isinstance(value, int) else float(value) for key, value in json.loads(line).items()}
    except (ValueError, TypeError, AttributeError):
        return None
    return row if "step" in row else None
