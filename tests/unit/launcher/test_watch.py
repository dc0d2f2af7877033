"""Which process a launcher names as the cause, with scripted processes and real records of the watchdog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.launcher import local, watch
from megarl.parallel import watchdog
from megarl.parallel.watchdog import Monitor

WORKS, BROKEN = watchdog.COMPUTES, watchdog.FAILED  # the last collective of a rank


@dataclass
class Scripted:
    """A process that ends at `end_s`, and not when it is killed."""

    name: str
    code: int | None = None
    end_s: float = 0.0
    state: int = WORKS
    log: Path | None = None
    is_lost: str = ""
    killed: bool = False

    def poll(self) -> int | None:
        return self.code if watch.time.monotonic() >= self.end_s else None

    def lost(self) -> str:
        return self.is_lost

    def send_signal(self, number: int) -> None:
        raise AssertionError(f"nobody sends signal {number}")

    def kill(self) -> None:
        self.killed = True


def watched(
    folder: Path, ranks: Sequence[watch.Task], servers: Sequence[watch.Task], monkeypatch: pytest.MonkeyPatch
) -> int:
    """Runs `watch` with a clock that goes on by a second at each sleep. Only rank 0 writes to the terminal."""
    now = 0.0

    def sleep(_: float) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    for number, rank in enumerate(ranks):
        recorder = watchdog._Recorder(folder, number)
        recorder.stage = "rollout"
        recorder.join("broadcast over default_pg (ranks 0, 1)")
        recorder.turn(getattr(rank, "state", WORKS))
        if number:
            rank.log = folder / f"rank_{number}.log"
            rank.log.write_text(f"megarl: words of rank {number}\n")
    return watch.watch(ranks, servers, Monitor(folder, len(ranks), 600.0))


@pytest.mark.parametrize("later_s", [0, 1, 9])
def test_a_rank_that_rank_0_broke_by_its_end_is_not_named(
    later_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 tells an error of a server on the terminal and ends; the others lose their connection."""
    ranks = [Scripted("rank 0", 2), Scripted("rank 1", 1, later_s, BROKEN)]
    assert watched(tmp_path, ranks, [], monkeypatch) == 2
    lines = capsys.readouterr().err.splitlines()
    assert not any(line.startswith("megarl: the run ended because rank 1") for line in lines), lines
    if later_s == 0:
        cause = "rank 0 ended with code 2 in stage rollout, past collective 1, broadcast over default_pg (ranks 0, 1)"
        assert lines[-1] == f"megarl: the run ended because {cause}; what it said stands above"
    else:
        assert lines == []  # what rank 0 said is the last line


def test_of_two_ranks_that_fail_by_themselves_both_are_shown_and_the_first_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with NCCL, which rarely notices that another rank has ended."""
    assert watched(tmp_path, [Scripted("rank 0", 2), Scripted("rank 1", 1, 5)], [], monkeypatch) == 2
    text = capsys.readouterr().err
    assert "megarl: rank 1 ended with code 1 in stage rollout" in text
    assert text.splitlines()[-1].startswith("megarl: the run ended because rank 0 ended with code 2 in stage rollout")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("later_s", [0, 1, 9])
def test_the_rank_that_broke_the_others_is_named_though_it_ends_last(
    later_s: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its connections close before its process has ended."""
    ranks = [Scripted(f"rank {i}", 1, 0, BROKEN) for i in range(3)]
    ranks[number] = Scripted(f"rank {number}", 3, later_s, WORKS)
    assert watched(tmp_path, ranks, [], monkeypatch) in (1, 3)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"megarl: the run ended because rank {number} ended with code 3 in stage rollout, past ")
    assert last.endswith(f": words of rank {number}")


def test_a_lost_rank_0_is_told_though_it_writes_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [
        Scripted("rank 0", 70, is_lost="was lost with its Ray actor (node died)"),
        Scripted("rank 1", 1, 1, BROKEN),
    ]
    assert watched(tmp_path, ranks, [], monkeypatch) == 70
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("megarl: the run ended because rank 0 was lost with its Ray actor (node died) in stage ")


def test_a_server_goes_before_the_rank_that_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server_0.log"
    log.write_text("no room\n")
    assert watched(tmp_path, [Scripted("rank 0", 1)], [Scripted("server 0", 3, log=log)], monkeypatch) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "megarl: the run ended because server 0 ended with code 3: no room"


def test_a_rank_that_stays_after_the_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [Scripted("rank 0", 0), Scripted("rank 1", -9, 10_000)]
    assert watched(tmp_path, ranks, [], monkeypatch) == 1
    assert ranks[1].killed
    text = capsys.readouterr().err
    assert "megarl: rank 1 does not end after SIGKILL: a driver or a file system holds it\n" in text
    cause = "rank 1 still ran 60 s after another rank had ended, in stage rollout, past collective 1"
    assert text.splitlines()[-1].startswith(f"megarl: the run ended because {cause}")


def test_a_process_that_does_not_end_hides_no_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are killed too, and the cause is the last line."""
    monkeypatch.setattr(local, "KILL_DEADLINE_S", 0.05)
    held = local.Process("rank 1", ["-c", "import time; time.sleep(600)"], {}, tmp_path / "held.log")
    kill = held.process.kill
    monkeypatch.setattr(held.process, "kill", lambda: None)  # as one that the kernel holds
    other = Scripted("server 0", None)
    ranks: list[watch.Task] = [Scripted("rank 0", None), held, Scripted("rank 2", 4)]
    try:
        assert watched(tmp_path, ranks, [other], monkeypatch) == 4
    finally:
        kill()
        held.process.wait(300)
    assert other.killed
    lines = capsys.readouterr().err.splitlines()
    assert "megarl: rank 1 does not end after SIGKILL: a driver or a file system holds it" in lines
    assert lines[-1].startswith("megarl: the run ended because rank 2 ended with code 4 in stage rollout")
