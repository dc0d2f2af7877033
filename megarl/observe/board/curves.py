"""Curves of a run: which metrics a chart has, their points thinned out, and the seconds of each stage."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from megarl.observe import metrics
from megarl.observe.board.growing_file import GrowingFile

MAX_POINTS = 800  # of a curve; longer ones keep the lowest and the highest of each stretch
PERCENT = "%"  # unit of metrics that are parts of 1: the page multiplies them by 100

# Title, unit, and metrics with their labels. A chart is left out if no run shown has any of its metrics.
CHARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Held-out accuracy", PERCENT, {metrics.ACCURACY: "held out"}),
    ("Training reward", "mean reward", {metrics.REWARD: "reward"}),
    ("Preferences in order", PERCENT, {"train/accuracy": "trained", "eval/pair_accuracy": "held out"}),
    ("Margin", "reward of chosen less rejected", {"train/margin": "trained", metrics.MARGIN: "held out"}),
    ("Loss", "mean of the step", {metrics.LOSS: "policy or model", "train/critic_loss": "critic"}),
    ("Gradient norm", "before clipping", {"train/grad_norm": "norm"}),
    ("Entropy", "nats a token", {"train/entropy": "entropy"}),
    ("Clipped tokens", PERCENT, {"train/clip_fraction": "clipped"}),
    (
        "Rollout against trainer",
        "nats, |difference| of log-probs",
        {"train/logprob_diff_max": "largest", "train/logprob_diff_mean": "mean"},
    ),
    (
        "Distance of rollout and trainer",
        "nats a token",
        {"train/rollout_kl": "KL (k3)", "train/rollout_kl_k1": "KL (k1)", "train/rollout_chi2": "chi-square"},
    ),
    (
        "Effective samples of the correction",
        PERCENT,
        {"train/rollout_ess": "tokens", "train/rollout_ess_sequences": "sequences"},
    ),
    ("Staleness", "versions", {metrics.STALENESS: "mean", "rollout/staleness_max": "largest"}),
    ("Completion length", "tokens", {"rollout/completion_len": "mean", "rollout/completion_len_max": "longest"}),
    ("Truncated completions", PERCENT, {"rollout/truncated": "truncated"}),
    ("Speed", "tokens a second", {metrics.ROLLOUT_TOKENS_PER_S: "rollout", metrics.TRAIN_TOKENS_PER_S: "training"}),
    ("Weight syncs", "MB sent", {"sync/mbytes": "sent"}),
    ("Servers", "servers in the sync", {"sync/servers": "servers"}),
    ("Left out", "a step", {"rollout/rejected": "prompts", "rollout/dropped_samples": "samples"}),
)


class Curves:
    """Metrics of a run by name, as `metrics.jsonl` grows. Steps and values are kept as arrays of doubles."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self.rows = 0
        self.steps: dict[str, array[float]] = {}
        self.values: dict[str, array[float]] = {}
        self.ends = array("d")  # steps of all lines
        self.times = array("d")  # Unix seconds of all lines
        self._resets = 0

    def refresh(self) -> None:
        """Reads the lines that came since the last call."""
        self.file.check()
        self._drop_if_void()
        for _, _, values in self.file.new_lines():
            self._drop_if_void()
            step = values.get("step")
            if not is_number(step):
                self.file.damaged += 1
                continue
            self.rows += 1
            self.ends.append(step)
            time = values.get("time")
            self.times.append(time if is_number(time) else math.nan)
            for name, value in values.items():
                if name not in ("step", "time") and is_number(value):
                    self.steps.setdefault(name, array("d")).append(step)
                    self.values.setdefault(name, array("d")).append(value)

    def _drop_if_void(self) -> None:
        if self.file.resets != self._resets:
            self._resets, self.rows = self.file.resets, 0
            self.steps, self.values, self.ends, self.times = {}, {}, array("d"), array("d")

    @property
    def stamp(self) -> str:
        """Text that differs whenever the curves do."""
        return f"{self._resets}-{self.rows}"

    def series(self) -> dict[str, list[list[float]]]:
        """Points of each metric as `[steps, values]`, at most MAX_POINTS. Stages of a step have their own."""
        return {
            name: thinned(self.steps[name], values)
            for name, values in self.values.items()
            if not name.startswith(metrics.TIME)
        }

    def hours(self) -> list[list[float]]:
        """Hours since the first line, as `[steps, hours]`."""
        known = [(step, time) for step, time in zip(self.ends, self.times, strict=True) if math.isfinite(time)]
        if not known:
            return [[], []]
        return thinned([step for step, _ in known], [(time - known[0][1]) / 3600 for _, time in known])

    def stages(self) -> dict[str, list[list[float]]]:
        """Seconds of each stage of one step, as `[steps, seconds]` with equal steps for all stages.

        A line's seconds are divided over the steps it covers. More than MAX_POINTS lines are averaged.
        """
        rows = self._stage_rows()
        group = -(-len(rows) // MAX_POINTS) if rows else 1
        result: dict[str, list[list[float]]] = {}
        for name in self.stage_names():
            means = [
                sum(row[1].get(name, 0.0) for row in part) / len(part)
                for part in (rows[i : i + group] for i in range(0, len(rows), group))
            ]
            steps = [rows[min(i + group, len(rows)) - 1][0] for i in range(0, len(rows), group)]
            result[name] = [steps, [significant(mean) for mean in means]]
        return result

    def timings(self) -> list[tuple[str, float, float, float]]:
        """Stage, its median and longest seconds over the steps that had it, and its seconds in all."""
        covered = self._covered()
        lines = []
        for name in self.stage_names():
            key = f"{metrics.TIME}{name}"
            own = list(zip(self.steps[key], self.values[key], strict=True))
            values = sorted(value / covered[step] for step, value in own)
            lines.append((name, values[len(values) // 2], values[-1], sum(value for _, value in own)))
        return lines

    def stage_names(self) -> list[str]:
        """Top-level stages: `rollout` for `time_s/rollout`, but not `time_s/sync/canary`, which is part of one."""
        return sorted(
            name.removeprefix(metrics.TIME)
            for name in self.values
            if name.startswith(metrics.TIME) and name.count("/") == 1
        )

    def _covered(self) -> dict[float, float]:
        """Number of steps that each line covers, by its last step; 1 for the line before training."""
        ends = [0.0, *self.ends]
        return {end: max(1.0, end - before) for before, end in itertools.pairwise(ends)}

    def _stage_rows(self) -> list[tuple[float, dict[str, float]]]:
        """Steps with an update, and their seconds by stage."""
        covered = self._covered()
        rows: dict[float, dict[str, float]] = {step: {} for step in self.steps.get(f"{metrics.TIME}update", ())}
        for name in self.stage_names():
            key = f"{metrics.TIME}{name}"
            for step, value in zip(self.steps[key], self.values[key], strict=True):
                if step in rows:
                    rows[step][name] = value / covered[step]
        return sorted(rows.items())


def thinned(steps: Sequence[float], values: Sequence[float]) -> list[list[float]]:
    """`[steps, values]` with at most MAX_POINTS points: the lowest and the highest of each stretch, and both ends."""
    count = len(values)
    if count <= MAX_POINTS:
        kept: Sequence[int] = range(count)
    else:
        stretches = (MAX_POINTS - 2) // 2
        bounds = [1 + n * (count - 2) // stretches for n in range(stretches + 1)]
        inner: set[int] = set()
        for first, end in itertools.pairwise(bounds):
            inner |= {min(range(first, end), key=values.__getitem__), max(range(first, end), key=values.__getitem__)}
        kept = [0, *sorted(inner), count - 1]
    return [[steps[i] for i in kept], [significant(values[i]) for i in kept]]


def significant(value: float) -> float:
    """The value at 6 significant digits, which a page shows and sends in fewer bytes."""
    return float(f"{value:.6g}")


def is_number(value: Any) -> TypeGuard[float]:
    """True for a number that a double holds; booleans and NaN are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300
