"""Reports of the monitor on stuck ranks, with real recorders and a fake clock."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.parallel import watchdog


@pytest.mark.parametrize("timeout_s", [10.0, 600.0])
@pytest.mark.parametrize(
    ("runs", "message"), [(False, r"rank 1 does not run \(stopped or starved\); "), (True, "rank 1 makes no progress ")]
)
def test_a_frozen_rank_is_distinguished_from_one_without_progress(
    timeout_s: float, runs: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    waiting, stuck = (watchdog._Recorder(tmp_path, rank) for rank in range(2))
    for recorder in (waiting, stuck):
        recorder.join("all_reduce over default_pg (ranks 0, 1)")
    waiting.turn(watchdog.WAITS)
    monitor = watchdog.Monitor(tmp_path, 2, timeout_s)
    report = None
    while report is None:
        assert now <= timeout_s + 2 * watchdog.BEAT_S
        waiting.beat()
        if runs or now < timeout_s / 10:  # stops a while after it last joined a collective
            stuck.beat()
        now += watchdog.BEAT_S
        report = monitor.check()
    assert re.match(message, report), report


def test_a_rank_between_two_stages_says_which_it_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_recorder", watchdog._Recorder(tmp_path, 0))
    monitor = watchdog.Monitor(tmp_path, 1, 10.0)
    with watchdog.stage("update"):
        assert monitor.describe(0) == "in stage update, no collective yet"
        with watchdog.stage("checkpoint"):
            pass
        assert monitor.describe(0) == "in stage update, no collective yet"
    assert monitor.describe(0) == "after update, no collective yet"
    with watchdog.stage("evaluate"):
        pass
    assert monitor.describe(0) == "after evaluate, no collective yet"
