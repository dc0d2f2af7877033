"""A push in the background leaves nothing to gather to its thread, and other ranks wait as long as rank 0 may."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from megarl.trainer.rollouts.weight_sync import WeightSync


def test_parameters_are_gathered_before_a_push_begins_in_the_background() -> None:
    """With parallel.overlap the optimizer leaves them split: the thread's gather would race with the forward pass."""
    calls: list[tuple[str, str]] = []

    def note(what: str) -> None:
        calls.append((what, threading.current_thread().name))

    source = SimpleNamespace(shards=lambda: note("shards"))
    session = SimpleNamespace(push=lambda *_: note("push"))
    sync: Any = SimpleNamespace(
        source=source, session=session, _announce=lambda _: None, _attempt=lambda transfer: ([], transfer())
    )
    WeightSync.begin_push(sync, 3)
    sync._pushing.background.result()
    assert [what for what, _ in calls] == ["shards", "push"]
    assert calls[0][1] == threading.current_thread().name
    assert calls[1][1] != threading.current_thread().name
