"""Durations of a step's stages, and the time left."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from megarl.observe.metrics import TIME

WINDOW = 20  # last steps in medians and means


class StageTimes:
    """Seconds per stage over the last steps, from the `time_s/...` metrics of each step."""

    def __init__(self) -> None:
        self._stages: dict[str, deque[float]] = {}
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._last: dict[str, float] = {}

    def record(self, stats: Mapping[str, float], step_s: float) -> None:
        """Records the stage times in a step's metrics, and `step_s`, the seconds of the whole step.

        Only top-level stages count: `time_s/rollout`, not `time_s/actor/forward`, which is part of one.
        """
        self._steps.append(step_s)
        self._last = {}
        for key, value in stats.items():
            stage = key.removeprefix(TIME)
            if stage != key and "/" not in stage:
                self._last[stage] = value
                self._stages.setdefault(stage, deque(maxlen=WINDOW)).append(value)

    def last(self) -> dict[str, float]:
        """Returns the seconds of each stage that ran in the last step."""
        return self._last

    def median(self) -> dict[str, float]:
        """Returns the median seconds of each stage, over the last steps in which it ran."""
        return {stage: statistics.median(times) for stage, times in self._stages.items()}

    def eta_s(self, steps_left: int) -> float | None:
        """Estimates the seconds for `steps_left` more steps; None before the first step.

        Uses the mean, not the median, so that stages that run only every few steps, such as evaluation, count.
        """
        return statistics.fmean(self._steps) * steps_left if self._steps else None


def clock(seconds: float) -> str:
    """Formats seconds as `42s`, `3m05s`, `2h07m` or `3d04h`."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{minutes}m{s:02d}s" if minutes else f"{s}s"
