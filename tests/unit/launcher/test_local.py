"""Ranks that megarl starts itself: they end together, and die with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.launcher import local, watch
from megarl.launcher.job import Job
from megarl.rollout.servers.sglang_server import still_running

RANK = """
import os, sys, time
from megarl.processes import die_with_parent
die_with_parent(int(os.environ["MEGARL_PARENT_PID"]))
rank = os.environ["RANK"]
with open(os.path.join(sys.argv[1], ".pid_" + rank), "w") as file:
    file.write(str(os.getpid()))
os.replace(file.name, os.path.join(sys.argv[1], "pid_" + rank))
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
{body}
"""


@pytest.fixture
def rank_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(local.__file__).parents[2]}")
    return tmp_path / "rank_module.py"


def test_ranks_know_their_place_and_write_their_own_logs(rank_module: Path, tmp_path: Path) -> None:
    rank_module.write_text(RANK.format(body=""))
    assert local.run_ranks("rank_module", [str(tmp_path)], 3, tmp_path) == 0
    assert [(tmp_path / f"rank_{i}.log").read_text() for i in (1, 2)] == ["rank 1 of 3\n", "rank 2 of 3\n"]


def test_a_rank_that_fails_is_shown_and_ends_the_others(
    rank_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "FAILURE_GRACE_S", 0.5)
    others = "print('gloo: connection closed by peer', file=sys.stderr, flush=True)"
    body = f"sys.exit(7) if rank == '1' else (time.sleep(1), {others}, time.sleep(1000))"
    rank_module.write_text(RANK.format(body=body))
    started = time.monotonic()
    assert local.run_ranks("rank_module", [str(tmp_path)], 2, tmp_path) == 7
    assert time.monotonic() - started < 300
    text = capsys.readouterr().err
    assert (
        f"rank 1 ended with code 7 before it had joined the other ranks; its log {tmp_path}/rank_1.log ends:\n  rank 1"
        in text
    )
    last = text.splitlines()[-1]  # below what the other ranks said
    ended = "megarl: the run ended because rank 1 ended with code 7 before it had joined the other ranks"
    assert last == f"{ended}: rank 1 of 2"


@pytest.mark.parametrize(
    ("end", "cause", "code"),
    [
        (
            "print('megarl: the disk is full', file=sys.stderr); sys.exit(1)",
            "ended with code 1 {}: the disk is full",
            1,
        ),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL {}", 137),
        ("sys.stdout.close(); os.truncate(sys.argv[1] + '/rank_1.log', 0); os._exit(3)", "ended with code 3 {}", 3),
    ],
)
def test_the_last_line_has_the_cause_and_what_the_rank_said_of_it(
    rank_module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, cause: str, code: int
) -> None:
    rank_module.write_text(RANK.format(body=f"if rank == '1': {end}"))
    assert local.run_ranks("rank_module", [str(tmp_path)], 2, tmp_path) == code
    said = cause.format("before it had joined the other ranks")
    assert capsys.readouterr().err.splitlines()[-1] == f"megarl: the run ended because rank 1 {said}"


COMMAND = """
import os
from megarl import cli
from megarl.knobs import UserError

def command(arguments):
    print("step 12")
    if os.environ["RANK"] == "1":
        raise {error}("no such folder")
    return 0

cli.exit_with(command)
"""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("UserError", "ended with code 2 {}: no such folder"),
        ("ValueError", "ended with code 1 {}: ValueError: no such folder"),
    ],
)
def test_what_a_command_printed_does_not_hide_its_error(
    error: str,
    cause: str,
    rank_module: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    rank_module.write_text(COMMAND.format(error=error))
    local.run_ranks("rank_module", [], 2, tmp_path)
    said = cause.format("before it had joined the other ranks")
    assert capsys.readouterr().err.splitlines()[-1] == f"megarl: the run ended because rank 1 {said}"


@pytest.mark.parametrize(("rank", "code"), [("0", 5), ("1", 6)])
def test_the_code_of_a_rank_that_fails_is_the_runs_though_the_others_end_well(
    rank: str, code: int, rank_module: Path, tmp_path: Path
) -> None:
    rank_module.write_text(RANK.format(body=f"sys.exit({code} if rank == '{rank}' else 0)"))
    assert local.run_ranks("rank_module", [str(tmp_path)], 2, tmp_path) == code


def test_a_rank_that_fails_after_another_has_ended_well_is_shown(
    rank_module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
import psutil
place = os.path.join(sys.argv[1], "pid_0")
while rank == "1" and (not os.path.exists(place) or psutil.pid_exists(int(open(place).read()))):
    time.sleep(0.05)  # until rank 0 has ended and was looked at
sys.exit(int(rank))
"""
    rank_module.write_text(RANK.format(body=body))
    assert local.run_ranks("rank_module", [str(tmp_path)], 2, tmp_path) == 1
    assert "megarl: the run ended because rank 1 ended with code 1" in capsys.readouterr().err


def test_a_rank_that_stays_when_another_has_ended_well_is_killed_and_the_run_fails(
    rank_module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STOP_DEADLINE_S", 0.5)
    body = """
while not os.path.exists(os.path.join(sys.argv[1], "pid_1")): time.sleep(0.05)
time.sleep(1000 if rank == "1" else 0)
"""
    rank_module.write_text(RANK.format(body=body))
    assert local.run_ranks("rank_module", [str(tmp_path)], 2, tmp_path) == 1
    assert not psutil.pid_exists(int((tmp_path / "pid_1").read_text()))


def test_a_server_that_fails_as_the_ranks_end_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks wait for the server's end, so both are seen in one look or the server first."""
    rank = """
while not os.path.islink(folder / 'server'): time.sleep(0.05)
server = Path('/proc', os.readlink(folder / 'server'), 'stat')
try:
    while server.read_text().rpartition(')')[2].split()[0] != 'Z': time.sleep(0.05)
except OSError: pass  # reaped
"""
    fake_run(monkeypatch, rank, server="os.symlink(str(os.getpid()), folder / 'server'); time.sleep(0.3); sys.exit(4)")
    assert local.launch(job_of(tmp_path, 1, 1)) == 4


def test_ranks_die_with_the_process_that_started_them(rank_module: Path, tmp_path: Path) -> None:
    rank_module.write_text(RANK.format(body="time.sleep(1000)"))
    code = f"from megarl.launcher.local import run_ranks; from pathlib import Path; p = {str(tmp_path)!r}; "
    parent = subprocess.Popen([sys.executable, "-c", code + "run_ranks('rank_module', [p], 2, Path(p))"])
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("pid_*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = [psutil.Process(int(p.read_text())) for p in tmp_path.glob("pid_*")]
    assert len(ranks) == 2
    parent.kill()
    parent.wait(300)
    assert still_running(ranks, 300) == []


def test_a_variable_of_the_user_goes_before_the_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = local.rank_environment(1, 2, tmp_path / "rendezvous")
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["RANK"] == environment["LOCAL_RANK"] == "1"
    assert environment["MEGARL_PARENT_PID"] == str(os.getpid())


def job_of(tmp_path: Path, world_size: int, servers: int) -> Job:
    (tmp_path / "job").mkdir()
    return Job(tmp_path, tmp_path / "job", (), (), {"KEY": "k"}, world_size, servers, 1, 0, 60.0)


def fake_run(monkeypatch: pytest.MonkeyPatch, rank: str, server: str) -> None:
    """Replaces the commands of ranks and servers by lines of Python."""
    place = "import os, sys, time; from pathlib import Path; folder = Path(os.environ['MEGARL_JOB_FOLDER']);"
    for name, code in (("rank", rank), ("server", server)):
        original = getattr(Job, name)
        monkeypatch.setattr(
            Job,
            name,
            lambda self, *a, original=original, code=code, **k: (["-c", place + code], original(self, *a, **k)[1]),
        )


def test_servers_end_once_the_ranks_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = """
while not (folder / 'trainers-ended').exists(): time.sleep(0.05)
print('told, I am', os.environ['MEGARL_SERVER_INDEX'])
"""
    monkeypatch.setattr(watch, "SERVER_GRACE_S", 300.0)
    fake_run(monkeypatch, rank="time.sleep(0.3)", server=server)
    assert local.launch(job_of(tmp_path, 2, 2)) == 0
    assert [(tmp_path / f"server_{i}.log").read_text() for i in (0, 1)] == ["told, I am 0\n", "told, I am 1\n"]


def test_a_server_that_ends_is_shown_and_ends_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "FAILURE_GRACE_S", 0.2)
    fake_run(monkeypatch, rank="time.sleep(1000)", server="print('no room'); sys.exit(3)")
    assert local.launch(job_of(tmp_path, 2, 1)) == 3
    assert (
        f"megarl: server 0 ended with code 3; its log {tmp_path}/server_0.log ends:\n  no room"
        in capsys.readouterr().err
    )


def test_a_server_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SERVER_GRACE_S", 0.2)
    server = (
        "(folder / '.pid').write_text(str(os.getpid())); (folder / '.pid').rename(folder / 'pid'); time.sleep(1000)"
    )
    fake_run(monkeypatch, rank="pass", server=server)
    job = job_of(tmp_path, 1, 1)
    started = time.monotonic()
    assert local.launch(job) == 0
    assert time.monotonic() - started < 300
    assert not (job.folder / "pid").exists() or not psutil.pid_exists(int((job.folder / "pid").read_text()))


def test_ranks_and_servers_learn_where_they_meet(tmp_path: Path) -> None:
    job = Job(tmp_path, tmp_path / "job", ("+experiment=a",), ("b=1",), {"KEY": "k"}, 4, 1, 2, 8, 60.0)
    arguments, environment = job.rank(3, local_rank=1)
    assert arguments == ["-m", "megarl.train", "+experiment=a"]
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "KEY", "MEGARL_JOB_FOLDER")} == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "KEY": "k", "MEGARL_JOB_FOLDER": str(tmp_path / "job"),
    }  # fmt: skip
    arguments, environment = job.server(0, first_gpu=4)
    assert arguments == ["-m", "megarl.launcher.server_task", "b=1"]
    assert "RANK" not in environment
    assert environment["MEGARL_FIRST_SERVER_GPU"] == "4"
