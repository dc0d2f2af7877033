"""Gathers a step's numbers from anywhere in the code. Names the metrics of the progress view and the curve.

with stats_tracker.scope("actor"), stats_tracker.record_timing("forward"):
    stats_tracker.scalar(loss=0.3)
stats_tracker.export()   # {"actor/loss": 0.3, "time_s/actor/forward": 0.012}
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from megarl.observe.timeline import timeline

REWARD = "rollout/reward"  # mean over the step's completions
STALENESS = "rollout/staleness"  # mean over trained tokens: trainer version minus token version
ROLLOUT_TOKENS_PER_S = "rollout/tokens_per_s"  # sampled tokens, over the time in which episodes are under way
TRAIN_TOKENS_PER_S = "train/tokens_per_s"  # prompt and completion tokens through forward and backward
ACCURACY = "eval/accuracy"  # fraction of held-out problems solved, or of pairs in order
MARGIN = "eval/margin"  # mean reward of chosen less rejected completions, held out
LOSS = "train/loss"  # as the method defines it; sft: the mean over trained tokens, nats
LOGPROB_DIFF = "train/logprob_diff_max"  # largest |rollout - trainer| log-prob of a step's tokens
SYNC_VERIFIED = "sync/verified"  # 1 if the servers were proven to hold the weights that were sent
SYNCS = "sync/syncs"  # new versions on the servers since the line before
EVALUATION = "eval/"  # everything that is measured on held-out data
TIME = "time_s/"  # seconds of a stage, summed over the step

MAXIMUM = "_max"  # names that end so keep the largest value

_scopes: ContextVar[tuple[str, ...]] = ContextVar("megarl_stats_scopes", default=())
_ledger: ContextVar[str] = ContextVar("megarl_stats_ledger", default="")


class _Numbers:
    """Sums, means and maxima by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._means: dict[str, tuple[float, float]] = {}  # total, count; of a rate: numerator, denominator

    def add_to_sum(self, key: str, value: float) -> None:
        _refuse_two_meanings(key, self._means)
        self._sums[key] = self._sums.get(key, 0.0) + value

    def add_to_mean(self, key: str, total: float, count: float) -> None:
        """Adds `count` values with the sum `total`; for a name that ends in `_max`, one value that counts once."""
        _refuse_two_meanings(key, self._sums)
        before, number = self._means.get(key, (0.0, 0))
        if not key.endswith(MAXIMUM):
            self._means[key] = (before + total, number + count)
        elif not number or total > before or math.isnan(total):
            self._means[key] = (total, 1)

    def merge(self, other: _Numbers) -> None:
        for key, value in other._sums.items():
            self.add_to_sum(key, value)
        for key, (total, count) in other._means.items():
            self.add_to_mean(key, total, count)

    def values(self) -> dict[str, float]:
        """Sums, then means and maxima, each in the order of their first record."""
        return self._sums | {key: total / count for key, (total, count) in self._means.items()}


class _Ledger:
    """Numbers of one run."""

    def __init__(self) -> None:
        self.step = _Numbers()  # since the last `step` or `export`
        self.steps = _Numbers()  # between the last `export` and the last `step`


class StatsTracker:
    """Numbers recorded since the last `export`. Safe to use from threads and asyncio tasks at once.

    A scope belongs to the thread or task that opened it; the numbers are shared. `step` reads them step by step, while
    `export` covers all steps since its last call. Runs that share a process have a ledger each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ledgers: dict[str, _Ledger] = {}

    @contextmanager
    def ledger(self, name: str) -> Iterator[None]:
        """Records into the ledger `name` inside, and reads it. It belongs to the thread or task, as a scope does."""
        token = _ledger.set(name)
        try:
            yield
        finally:
            _ledger.reset(token)

    def hand_over(self, ledgers: Iterable[str]) -> None:
        """Moves the numbers of the current step into the step of each of `ledgers`, which have them in common."""
        with self._lock:
            own = self._own()
            numbers, own.step = own.step, _Numbers()
            for name in ledgers:
                self._ledgers.setdefault(name, _Ledger()).step.merge(numbers)

    def _own(self) -> _Ledger:
        return self._ledgers.setdefault(_ledger.get(), _Ledger())

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Puts `name/` before the names recorded inside; nests."""
        token = _scopes.set((*_scopes.get(), name))
        try:
            yield
        finally:
            _scopes.reset(token)

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to `time_s/<scopes>/<name>`, also when the block raises.

        The timeline gets them as a span.
        """
        key = TIME + _key(name)
        start = time.perf_counter()
        try:
            with timeline.span(_key(name)):
                yield
        finally:
            self._add(key, time.perf_counter() - start)

    def scalar(self, **values: float) -> None:
        """Records values whose mean `export` returns; their largest for names that end in `_max`."""
        for name, value in values.items():
            key, value = _key(name), float(value)
            with self._lock:
                self._own().step.add_to_mean(key, value, 1)

    def rate(self, **values: tuple[float, float]) -> None:
        """Records (amount, seconds) pairs; `export` returns the sum of amounts over the sum of seconds."""
        for name, (amount, seconds) in values.items():
            key = _key(name)
            with self._lock:
                self._own().step.add_to_mean(key, float(amount), float(seconds))

    def total(self, **values: float) -> None:
        """Records values whose sum `export` returns, such as token counts."""
        for name, value in values.items():
            self._add(_key(name), float(value))

    def step(self) -> dict[str, float]:
        """Numbers recorded since the last `step` or `export`. They stay part of the next `export`."""
        with self._lock:
            own = self._own()
            step, own.step = own.step, _Numbers()
            own.steps.merge(step)
        return step.values()

    def export(self) -> dict[str, float]:
        """Sums, means and maxima recorded since the last `export`, in the order they came. Starts afresh."""
        self.step()
        with self._lock:
            own = self._own()
            steps, own.steps = own.steps, _Numbers()
        return steps.values()

    def _add(self, key: str, value: float) -> None:
        with self._lock:
            self._own().step.add_to_sum(key, value)


def _key(name: str) -> str:
    return "/".join((*_scopes.get(), name))


def _refuse_two_meanings(key: str, other: dict) -> None:
    if key in other:
        raise ValueError(f"{key} was recorded by scalar (a mean) and by total (a sum); give one of them another name")


stats_tracker = StatsTracker()
