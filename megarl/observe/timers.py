"""How long the stages of a step take, and when the run will be over."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from megarl.observe.metrics import TIME

WINDOW = 20  # steps that the medians look back on


class StageTimes:
    """Seconds per stage over the last steps, fed with the `time_s/...` metrics of each step."""

    def __init__(self) -> None:
        self._stages: dict[str, deque[float]] = {}
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._last: dict[str, float] = {}

    def record(self, stats: Mapping[str, float], step_s: float) -> None:
        """Takes the stage times out of a step's metrics, and `step_s`, the seconds the whole step took.

        Only top-level stages count (`time_s/rollout`, not `time_s/actor/forward`, which is inside one).
        """
        self._steps.append(step_s)
        self._last = {}
        for key, value in stats.items():
            stage = key.removeprefix(TIME)
            if stage != key and "/" not in stage:
                self._last[stage] = value
                self._stages.setdefault(stage, deque(maxlen=WINDOW)).append(value)

    def last(self) -> dict[str, float]:
        """Seconds of each stage that ran in the last step."""
        return self._last

    def median(self) -> dict[str, float]:
        """Median seconds of each stage, over the last steps in which it ran."""
        return {stage: statistics.median(times) for stage, times in self._stages.items()}

    def eta_s(self, steps_left: int) -> float | None:
        """Seconds until `steps_left` more steps are done; None before the first step.

        The mean, not the median: stages that run every few steps, such as evaluation, take their share.
        """
        return statistics.fmean(self._steps) * steps_left if self._steps else None


def clock(seconds: float) -> str:
    """Seconds as people read them: `42s`, `3m05s`, `2h07m`, `3d04h`."""
    whole = max(0, round(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{minutes}m{s:02d}s" if minutes else f"{s}s"
