"""A run around its training loop: steps, metrics, progress, checkpoints, the orderly stop, and the summary."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from megarl.actor.api import TrainEngine
from megarl.config import Config
from megarl.observe import metrics
from megarl.observe.logger import StatsLogger, read_metrics
from megarl.observe.metrics import stats_tracker
from megarl.observe.profiler import StepProfiler
from megarl.observe.progress import Progress, print_wrapped
from megarl.observe.report import draw_curve, summary_lines, write_summary
from megarl.observe.run_folder import RunFolder
from megarl.observe.timeline import timeline
from megarl.parallel import watchdog
from megarl.rollout.executor import NoSamplesError
from megarl.trainer.checkpoints.saver import ACTOR, Saver
from megarl.trainer.checkpoints.trainer_state import Resumable
from megarl.trainer.replay.kept_batches import BatchRing
from megarl.trainer.run_owner import RunOwner
from megarl.trainer.stop_signal import StopSignal
from megarl.types import PackedBatch

# Generation-0 threshold of the garbage collector. Python's default of 700 runs it 17 times in a rollout.
GARBAGE_EVERY = 10_000


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """A stage of a step: its seconds go to the metrics, its name to this rank's record (see `parallel.watchdog`)."""
    with watchdog.stage(name), stats_tracker.record_timing(name):
        yield


class Run:
    """One run in its folder. A context manager; a loop iterates over `steps()`.

    Every rank has one and calls the same methods; rank 0 alone writes and prints. Checkpoints hold the engines by name,
    one of them `actor`, and the parts by name. A part that exists on rank 0 alone is None on the others. `started` is
    the start of the command, by `time.monotonic()`. A run that is not alone in its process obeys the `stop` that all
    have in common, prints lines, and leaves the process's timeline alone.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        engines: Mapping[str, TrainEngine],
        parts: Mapping[str, Resumable | None],
        started: float,
        stop: StopSignal | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.engines = engines
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.is_rank0 = dist.get_rank() == 0
        self.done = 0  # steps whose update is taken
        self._logged = 0
        self.stopped = False
        self.facts: dict[str, Any] = {}  # kept over resumes and written to the summary
        self.before_save: Callable[[], None] = lambda: None  # brings all engines' memory to the device
        self._logger: StatsLogger | None = None
        self._progress: Progress | None = None
        self._unwritten = 0  # calls of `log` since the last line of metrics
        self._is_alone = stop is None
        self._stop = stop or StopSignal(self.note)
        self._owner: RunOwner | None = None
        lines = (folder.metrics, folder.episodes, folder.samples)
        self._saver = Saver(config.saver, folder.checkpoints, self.note, self._check_owner, lines)
        self._batches = BatchRing(config, folder.batches, self.note)
        self._profiler = StepProfiler(config.logger, folder.profiles, dist.get_rank())
        self._started = started
        self._before_s = 0.0  # wall seconds of the parts before a resume
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Run:
        stats_tracker.export()  # drops numbers left by an earlier run of this process
        if self.is_rank0:
            self._owner = RunOwner(self.folder)
        if self.config.resume:
            state = self._saver.restore(self.engines)
            self.done, self.facts, self._before_s = state["step"], state["facts"], state["wall_s"]
            for name, part in self.parts.items():
                if name in state["parts"]:
                    part.load_state_dict(state["parts"][name])
                else:
                    self.note(f"the checkpoint of step {self.done} holds no {name}: they begin anew")
            self._logged = self.done
        with contextlib.ExitStack() as stack:
            if self.is_rank0:
                self._batches.forget_after(self.done)
                after = self.done if self.config.resume else -1
                self._logger = stack.enter_context(StatsLogger(self.folder.path, self.config.logger, after))
                self._progress = self._make_progress()
            if self._is_alone:
                stack.enter_context(self._stop)
                timeline.open(self.folder.timeline / f"rank_{dist.get_rank()}.jsonl")
                stack.callback(lambda: timeline.close(self.done))
            stack.callback(self._profiler.close)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        with self._open:
            if isinstance(error, NoSamplesError) and self.done:
                self.log_taken()
                self._keep_steps()
                self.note(f"step {self.done} is saved; when the cause is mended, go on with resume={self.folder.job}")

    def _make_progress(self) -> Progress:
        """The display; a resumed run's has the accuracies before the resume. Notes that no step is left to take."""
        total, accuracies = self.config.total_train_steps, []
        if self.config.resume:
            rows = read_metrics(self.folder.metrics)
            accuracies = [(int(row["step"]), row[metrics.ACCURACY]) for row in rows if metrics.ACCURACY in row]
            if self.done >= total:
                self.note(f"no step is left: step {self.done} is taken, total_train_steps={total}; raise it")
        title = self.config.experiment_name
        return Progress(title, total, self.done, accuracies=accuracies, is_alone=self._is_alone)

    def note(self, message: str) -> None:
        """Prints a line on rank 0, above the live view if there is one."""
        if self.is_rank0 and self._progress is not None:
            self._progress.note(message)
        elif self.is_rank0:
            print(message, flush=True)

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps to take, from 1. Writes due checkpoints, and one at the end.

        Ends early after a stop signal.
        """
        gc.collect()
        gc.freeze()  # excludes all present objects: scanning them takes 0.2 s in the middle of a step
        gc.set_threshold(GARBAGE_EVERY)
        with self._progress or contextlib.nullcontext():
            for step in range(self.done + 1, self.config.total_train_steps + 1):
                if self._stop.on_all_ranks():
                    self.stopped = True
                    break
                self._check_owner()
                self._profiler.begin_step(step)
                yield step
                self.done = step
                self._profiler.end_step(step)
                self._saver.poll()
                if self._saver.due(step):
                    self._save()
        self._keep_steps()
        if self.stopped:
            self.note(f"stopped after step {self.done}; go on with resume={self.folder.job}")

    def taken(self, step: int) -> None:
        """Counts a step once its update is taken: a checkpoint of the weights from now on has its number."""
        self.done = step

    def log_taken(self) -> None:
        """Logs the last step if it was taken, and the run ends before the step does."""
        if self._logged < self.done:
            self.log(self.done)

    def keep_batch(self, step: int, batch: Any) -> None:
        """Has rank 0 write the step's global batch, packed or padded, if `saver.keep_batches` is above 0.

        Call it before the step: a batch that crashes the trainer is then on disk.
        """
        if self.is_rank0 and self._batches.enabled:
            self._check_owner()
            with timeline.span("keep batch"):
                self._batches.keep(step, PackedBatch.from_padded(batch))

    def _keep_steps(self) -> None:
        """Writes the last line of metrics and the last checkpoint, unless they are written, and waits for them."""
        if self._unwritten:
            self._write_metrics(self.done)
        if self._saver.saved != self.done:
            self._save()
        self._saver.finish()

    def log(self, step: int) -> None:
        """Shows the numbers that `stats_tracker` gathered during the step, and writes a line of metrics if one is due.

        All ranks call it; rank 0's numbers count.
        """
        self._unwritten += 1
        self._logged = step
        timeline.end_step(step)
        if step == 1 and self.is_rank0:
            self.facts.setdefault("time_to_first_step_s", self.wall_s)
        shown = _with_rate(stats_tracker.step(), steps=1)
        if self._line_is_due(step, shown):
            self._write_metrics(step)
        if self._progress is not None:
            self._progress.update(step, shown)

    def _line_is_due(self, step: int, stats: Mapping[str, float]) -> bool:
        """True every `logger.every_steps` steps, at step 0, evaluations and the last step.

        Also at checkpoints: a resumed run then repeats whole lines, and its lines cover every step once.
        """
        return (
            step % self.config.logger.every_steps == 0
            or step == self.config.total_train_steps
            or self._saver.due(step)
            or any(name.startswith(metrics.EVALUATION) for name in stats)
        )

    def _write_metrics(self, step: int) -> None:
        """Writes the line of the steps since the last one."""
        stats = _with_rate(stats_tracker.export(), self._unwritten)
        self._unwritten = 0
        if self._logger is not None:
            self._check_owner()
            self._logger.commit(step, stats)

    def _check_owner(self) -> None:
        if self._owner is not None:
            self._owner.check()

    @property
    def wall_s(self) -> float:
        """Seconds since the command began, those before a resume included."""
        return self._before_s + time.monotonic() - self._started

    def _save(self) -> None:
        with timeline.span("checkpoint"):
            self._save_state()

    def _save_state(self) -> None:
        self.before_save()
        state = {
            "facts": self.facts,
            "wall_s": self.wall_s,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }
        self._saver.save(self.engines, self.done, state)

    def finish(self) -> None:
        """Exports the model, writes summary.json and curve.png, prints the last lines. A collective."""
        if self.config.saver.export_hf:
            self.before_save()
            self.engines[ACTOR].save(self.folder.path / "hf")
        if self.is_rank0:
            self._summarise()
        dist.barrier()  # keeps the other ranks alive, and not "stuck", while rank 0 still writes

    def _summarise(self) -> None:
        rows = read_metrics(self.folder.metrics)
        summary = {
            "experiment": self.config.experiment_name,
            "steps": self.done,
            "stopped_early": self.stopped,
            "wall_s": self.wall_s,
            **self.facts,
            **_figures(rows),
        }
        if any(k in row for row in rows for k in (metrics.ACCURACY, metrics.REWARD, metrics.LOSS)):
            draw_curve(self.folder.metrics, self.folder.curve, self.config.experiment_name)
        write_summary(self.folder.path, summary)
        for line in summary_lines(summary, self.folder.path):
            print_wrapped(line)


def _with_rate(stats: dict[str, float], steps: int) -> dict[str, float]:
    """Adds the training rate over `steps` steps: all their tokens over all their seconds of updates."""
    if "train/tokens" in stats:
        stats[metrics.TRAIN_TOKENS_PER_S] = stats["train/tokens"] * steps / stats[f"{metrics.TIME}update"]
    return stats


def _figures(rows: list[dict[str, float]]) -> dict[str, Any]:
    """The summary's figures from the lines of metrics. Leaves out figures that no line has."""
    figures: dict[str, Any] = {}

    def take(name: str, key: str, how: Any) -> None:
        values = [row[key] for row in rows if key in row]
        if values:
            figures[name] = how(values)

    take("tokens_per_s_rollout", metrics.ROLLOUT_TOKENS_PER_S, _median)
    take("tokens_per_s_train", metrics.TRAIN_TOKENS_PER_S, _median)
    take("max_rollout_train_logprob_diff", metrics.LOGPROB_DIFF, max)
    if any(metrics.SYNC_VERIFIED in row for row in rows):
        figures["weights_verified"] = _syncs_verified(rows)
    take("final_loss", metrics.LOSS, lambda values: values[-1])
    return figures


def _syncs_verified(rows: list[dict[str, float]]) -> int:
    """Weight syncs that were verified. A line's value is the mean over the syncs since the line before."""
    return round(sum(row.get(metrics.SYNC_VERIFIED, 0.0) * row.get(metrics.SYNCS, 0.0) for row in rows))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
