"""A push in the background leaves nothing to gather to its thread, and other ranks wait as long as rank 0 may."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.reshard import session as session_module
from megarl.reshard.config import ReshardConfig
from megarl.reshard.session import WeightSession
from megarl.reshard.sync.attempt import key
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.transfer.store import Deadline, Store, write
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


def test_other_ranks_wait_for_an_attempt_as_long_as_rank_0_may_wait_for_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that a restarted server reads for an hour is no failure of rank 0."""
    waits: list[float] = []

    def record(store: Store, number: int, deadline: Deadline) -> None:
        waits.append(deadline.seconds)
        write(store, key(number, "verdict"), {"message": "called off"})

    monkeypatch.setattr(session_module, "read_spec", record)
    session = WeightSession(ReshardConfig(path="full"), [], "")
    session._coordinator = None  # as another rank sees it
    weights: Any = SimpleNamespace(named_weights=lambda: iter(()))
    for wait_s in (0.0, 3600.0):
        session.await_servers_s = wait_s
        with pytest.raises(WeightSyncError, match="called off"):
            session.push(weights, 1)
    assert waits[1] - waits[0] == 3600
