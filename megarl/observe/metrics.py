"""Gathers numbers of a step wherever they arise, and the names of those that the progress view and the curve show.

with stats_tracker.scope("actor"), stats_tracker.record_timing("forward"):
    stats_tracker.scalar(loss=0.3)
stats_tracker.export()   # {"actor/loss": 0.3, "time_s/actor/forward": 0.012}
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

REWARD = "rollout/reward"  # mean over the step's completions
STALENESS = "rollout/staleness"  # mean over trained tokens: trainer version minus token version
ROLLOUT_TOKENS_PER_S = "rollout/tokens_per_s"  # sampled tokens, over the time in which episodes are under way
TRAIN_TOKENS_PER_S = "train/tokens_per_s"  # prompt and completion tokens through forward and backward
ACCURACY = "eval/accuracy"  # fraction of held-out problems solved, or of pairs in order
MARGIN = "eval/margin"  # by how much held-out chosen completions are ahead of rejected ones, in rewards
LOSS = "train/loss"  # as the method defines it; of sft the mean over trained tokens, nats
LOGPROB_DIFF = "train/logprob_diff_max"  # largest |rollout - trainer| log-prob of a step's tokens
SYNC_VERIFIED = "sync/verified"  # 1 where the servers were proven to hold what was sent
TIME = "time_s/"  # seconds of a stage, summed over the step

_scopes: ContextVar[tuple[str, ...]] = ContextVar("megarl_stats_scopes", default=())


class StatsTracker:
    """Numbers recorded since the last `export`. Safe to use from threads and asyncio tasks at once.

    A scope belongs to the thread or task that opened it; the numbers are shared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._means: dict[str, tuple[float, int]] = {}
        self._sums: dict[str, float] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Puts `name/` before the names of what is recorded inside; nests."""
        token = _scopes.set((*_scopes.get(), name))
        try:
            yield
        finally:
            _scopes.reset(token)

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to `time_s/<scopes>/<name>`, also when the block raises."""
        key = TIME + _key(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(key, time.perf_counter() - start)

    def scalar(self, **values: float) -> None:
        """Records values whose mean `export` returns."""
        for name, value in values.items():
            key, value = _key(name), float(value)
            with self._lock:
                _refuse_two_meanings(key, self._sums)
                total, count = self._means.get(key, (0.0, 0))
                self._means[key] = (total + value, count + 1)

    def total(self, **values: float) -> None:
        """Records values whose sum `export` returns, such as token counts."""
        for name, value in values.items():
            self._add(_key(name), float(value))

    def export(self) -> dict[str, float]:
        """Sums and means of what was recorded since the last call, in the order it came; starts afresh."""
        with self._lock:
            means, self._means = self._means, {}
            sums, self._sums = self._sums, {}
        return sums | {key: total / count for key, (total, count) in means.items()}

    def _add(self, key: str, value: float) -> None:
        with self._lock:
            _refuse_two_meanings(key, self._means)
            self._sums[key] = self._sums.get(key, 0.0) + value


def _key(name: str) -> str:
    return "/".join((*_scopes.get(), name))


def _refuse_two_meanings(key: str, other: dict) -> None:
    if key in other:
        raise ValueError(f"{key} was recorded by scalar (a mean) and by total (a sum); give one of them another name")


stats_tracker = StatsTracker()
