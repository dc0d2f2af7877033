"""Records some steps with torch.profiler, a trace for every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.observe.logger import LoggerConfig


class StepProfiler:
    """Records the steps that `logger.profile_from` and `logger.profile_steps` name.

    The trace goes to `RUN/profiles/rank_<n>.steps_<first>-<last>.json.gz`. Perfetto (ui.perfetto.dev) and Chrome's
    `chrome://tracing` show it. A run that ends within the range keeps its steps so far.
    """

    def __init__(self, config: LoggerConfig, folder: Path, rank: int) -> None:
        self._first = config.profile_from
        self._last = config.profile_from + config.profile_steps - 1
        self._folder, self._rank = folder, rank
        self._profile: Any = None
        self._begun = self._step = 0

    def begin_step(self, step: int) -> None:
        """Starts to record if `step` is in the range, also after a resume within it."""
        if not (self._first and self._first <= step <= self._last):
            return
        if self._profile is None:
            from torch.profiler import ProfilerActivity, profile, supported_activities  # slow to import

            wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
            self._profile = profile(activities=sorted(wanted, key=str))
            self._profile.start()
            self._begun = step
        self._step = step

    def end_step(self, step: int) -> None:
        """Writes the trace after the range's last step."""
        if self._profile is not None and step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes the trace of the steps so far, if any. May be called twice."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self._rank}.steps_{self._begun}-{self._step}.json.gz"
        profile.export_chrome_trace(str(self._folder / name))
