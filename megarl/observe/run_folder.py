"""Folder of a run: `runs/<experiment>/<time>/`, and the link `latest` next to it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from megarl.knobs import UserError, shown

logger = logging.getLogger(__name__)

ADAPTERS = "adapters"  # folder of the adapters' runs, in that of their job


class RunTakenError(RuntimeError):
    """Another command opened the run folder. The message names it."""


@dataclass(frozen=True)
class RunFolder:
    """Paths in the folder of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """Complete configuration, written by the command before anything starts."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One line of JSON per step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def timeline(self) -> Path:
        """One file per rank, one line per step: its spans, and rank 0's with the servers' loads."""
        return self.path / "timeline"

    @property
    def profiles(self) -> Path:
        """Traces of torch.profiler, one per rank."""
        return self.path / "profiles"

    @property
    def episodes(self) -> Path:
        """One line per prompt: its rewards, or the reason why it is not trained on."""
        return self.path / "episodes.jsonl"

    @property
    def samples(self) -> Path:
        """Some trained completions of each step, with their text."""
        return self.path / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        """One file per evaluation, one line per completion."""
        return self.path / "evaluations"

    @property
    def sync_plan(self) -> Path:
        """Traffic that the last plan of a weight sync puts on each rank."""
        return self.path / "sync_plan.json"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def batches(self) -> Path:
        """One file per kept batch (`saver.keep_batches`)."""
        return self.path / "batches"

    @property
    def logs(self) -> Path:
        """One log file per server and rank. A cluster job has a subfolder per attempt (`new_attempt`)."""
        return self.path / "logs"

    def adapter(self, name: str) -> RunFolder:
        """Folder of one adapter's run, in a job that trains several."""
        return RunFolder(self.path / ADAPTERS / name)

    @property
    def job(self) -> Path:
        """Folder that a resume names: the run's own, or of the job that this adapter's run belongs to."""
        job = RunFolder(self.path.parents[1])
        return job.path if job.adapter(self.path.name) == self and job.config.is_file() else self.path

    def make(self, again: bool = False) -> None:
        """Makes the subfolders. With `again`, some may exist."""
        for folder in (self.tensorboard, self.checkpoints, self.logs):
            folder.mkdir(parents=again, exist_ok=again)

    def new_attempt(self) -> Path:
        """Makes the next `logs/attempt_N`, counted from 1, and points `logs/latest` at it."""
        numbers = [int(p.name.removeprefix("attempt_")) for p in self.logs.glob("attempt_*")]
        attempt = self.logs / f"attempt_{max(numbers, default=0) + 1}"
        attempt.mkdir()
        _point_latest(self.logs / "latest", attempt.name)
        return attempt


def check_name(experiment: str) -> None:
    """Refuses an experiment's name that is no folder of its own.

    Raises:
        UserError: it is empty, has several parts, or is a name that megarl uses.
    """
    if not experiment or "/" in experiment or experiment in {".", "..", "latest"}:
        raise UserError(f"experiment_name={shown(experiment)} must be one folder name other than 'latest', without '/'")


def new_run(root: str | Path, experiment: str, name: str = "") -> RunFolder:
    """Makes `root/experiment/<time>/` with its subfolders and points `latest` at it.

    With a `name`, such as a cluster job's, the folder has this name instead, and an existing one is used again.

    Raises:
        UserError: `experiment` is not a plain name, or the folder cannot be written.
    """
    check_name(experiment)
    parent = Path(root) / experiment
    try:
        parent.mkdir(parents=True, exist_ok=True)
        run = RunFolder(parent / name if name else _new_folder(parent))
        run.make(again=bool(name))
    except OSError as error:
        raise UserError(f"run folder {parent} cannot be written ({error.strerror}); choose another root") from error
    _point_latest(parent / "latest", run.path.name)
    return run


def open_run(path: str | Path) -> RunFolder:
    """Opens the run in `path`, for `resume=`.

    Raises:
        UserError: `path` is not a run or is not writable; the message says what is missing.
    """
    run = RunFolder(Path(path).resolve())
    remedy = "give the folder of a run, such as runs/gsm8k_grpo/latest"
    if not run.path.is_dir():
        raise UserError(f"resume={path} is not a folder; {remedy}")
    missing = [f"{p.name}{kind}" for p, kind in ((run.config, ""), (run.checkpoints, "/")) if not p.exists()]
    if missing:
        raise UserError(f"resume={path} is not a run: it has no {' and no '.join(missing)}; {remedy}")
    if not os.access(run.path, os.W_OK):
        raise UserError(f"resume={path} cannot be written; copy it to a folder of your own and resume the copy")
    return run


def _new_folder(parent: Path) -> Path:
    """Makes a folder named by the time; a second run within the same second gets `-2`."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while True:
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):  # another command may make it at any moment
            folder.mkdir()
            return folder
        number += 1


def _point_latest(link: Path, name: str) -> None:
    """Replaces the link atomically. If the file system has no links, logs a warning instead of failing the run."""
    new = link.with_name(f".latest-{os.getpid()}")
    try:
        new.symlink_to(name, target_is_directory=True)
        os.replace(new, link)
    except OSError as error:
        new.unlink(missing_ok=True)
        logger.warning("%s was not pointed at %s: %s", link, name, error.strerror)
