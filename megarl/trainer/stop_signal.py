"""The orderly stop of a run: Ctrl-C or SIGTERM ends it after the step in progress, with a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from megarl.parallel.broadcast import broadcast_json, is_rank0

REPEAT_S = 1.0  # a second signal within this time is the same request


class StopSignal:
    """Turns the first Ctrl-C or SIGTERM into a request that the loop reads between steps; a second stops at once.

    Rank 0 decides; the other ranks ignore both signals and follow it.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._note = note
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        handler = self._on_signal if is_rank0() else signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, handler)
        return self

    def _on_signal(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self.requested and now - self._requested_at > REPEAT_S:
            raise KeyboardInterrupt
        if self.requested:
            return  # a supervisor signals both the process group and its leader
        self.requested, self._requested_at = True, now
        self._note(f"{signal.Signals(number).name}: stopping after this step with a checkpoint (again: stop at once)")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def on_all_ranks(self) -> bool:
        """Returns rank 0's request on every rank. A collective."""
        return bool(broadcast_json(self.requested))
