"""Reports of the monitor on stuck ranks, with real recorders and a fake clock."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.knobs import UserError
from megarl.parallel import groups, rendezvous, watchdog
from megarl.parallel.config import ParallelConfig


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


def test_a_file_server_that_does_not_answer_for_two_minutes_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that watch each other keep their records there, and those of a node stop while its client waits."""
    now, monitors = 0.0, []
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(watchdog, "_recorder", None)
    monkeypatch.setattr(watchdog, "_record_collectives", lambda recorder: None)
    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(watchdog.threading, "Thread", lambda **how: monitors.append(how["args"][2]) or thread)
    watchdog.start(tmp_path, 0, 2, 3600.0, guard=True)
    recorders = [watchdog._Recorder(tmp_path, rank) for rank in range(2)]
    for recorder in recorders:
        recorder.write()
    (monitor,) = monitors
    for _ in range(120):
        recorders[0].beat()
        now += 1.0
        assert monitor.check() is None
    for _ in range(600):
        recorders[0].beat()
        now += 1.0
    reports = []
    for _ in range(600):
        recorders[0].beat()
        now += 1.0
        reports.append(monitor.check())
    assert any(report and report.startswith("rank 1 does not run") for report in reports)


@pytest.mark.parametrize(("later_s", "named"), [(0, 1), (2, 1), (29, 1), (40, 0)])
def test_the_rank_that_others_wait_for_is_named_though_it_changed_later(
    later_s: int, named: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 30 s of 60 s a rank that computes is what the others wait for; before, it may still go on."""
    now = 0.0
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    waiting, computing = (watchdog._Recorder(tmp_path, rank) for rank in range(2))
    waiting.join("all_reduce over default_pg (ranks 0, 1)")
    waiting.turn(watchdog.WAITS)
    computing.write()
    monitor = watchdog.Monitor(tmp_path, 2, 60.0)
    report = None
    while report is None:
        assert now <= 60.0 + 2 * watchdog.BEAT_S
        for recorder in (waiting, computing):
            recorder.beat()
        if now == later_s:
            computing.join("all_gather over default_pg (ranks 0, 1)")
        now += watchdog.BEAT_S
        report = monitor.check()
    assert report.startswith(f"rank {named} makes no progress (parallel.timeout_s=60); rank {named} "), report


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


def test_an_error_of_the_shared_file_system_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EndedError(Exception):
        pass

    def flush() -> None:
        raise OSError(116, "Stale file handle")

    def sleep(_: float) -> None:
        if recorder.beats == 3 * watchdog.GUARD_EVERY:
            raise EndedError

    recorder = watchdog._Recorder(tmp_path, 0)
    monkeypatch.setattr(recorder, "flush", flush)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    with pytest.raises(EndedError):
        watchdog._beat(recorder, True, watchdog.Monitor(tmp_path, 1, 60.0))
    said = "megarl: the ranks' records cannot be kept now: [Errno 116] Stale file handle\n"
    assert capsys.readouterr().err == said


def test_on_a_shared_file_system_only_the_flush_touches_the_file(tmp_path: Path) -> None:
    """A page of a network file may take long, and would be waited for at each collective."""
    monitor = watchdog.Monitor(tmp_path, 1, 60.0)
    recorder = watchdog._Recorder(tmp_path, 0, shared=True)
    recorder.stage = "update"
    recorder.join("all_reduce over default_pg (ranks 0, 1)")
    assert monitor.describe(0) == "before it had joined the other ranks"
    recorder.flush()
    assert monitor.describe(0) == "in stage update, past collective 1, all_reduce over default_pg (ranks 0, 1)"
    recorder.turn(watchdog.WAITS)
    assert "past collective 1" in monitor.describe(0)
    recorder.flush()
    assert "waits in collective 1" in monitor.describe(0)


@pytest.mark.parametrize("job", [False, True], ids=["one machine", "a job of several"])
def test_records_of_a_jobs_folder_are_flushed_to_it_and_others_mapped(
    job: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(watchdog, "start", lambda *_, **how: started.append(how))
    monkeypatch.setenv(watchdog.WATCH, str(tmp_path))
    if job:
        monkeypatch.setenv(rendezvous.JOB_FOLDER, str(tmp_path))
    else:
        monkeypatch.delenv(rendezvous.JOB_FOLDER, raising=False)
    monkeypatch.setattr(groups, "_join_world", lambda *_: None)
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(groups.dist, "get_world_size", lambda: 0)
    with pytest.raises(UserError, match="0 were started"):
        groups.initialize(ParallelConfig())
    assert started == [{"shared": job}]
