"""Failing ranks: a NaN on one makes all skip the step; a dead or hanging rank ends all ranks and is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.launcher.local import run_ranks
from megarl.parallel.watchdog import EXIT_STUCK
from megarl.rollout.servers.sglang_server import still_running
from tests.distributed.health_worker import LAYOUTS, MAX_SKIPPED

TIMEOUT_S = 60  # parallel.timeout_s of the launcher's watch over the broken runs
RANKS_TIMEOUT_S = 600  # parallel.timeout_s of their ranks, which a busy machine starts late
END_S = 900  # limit for the end of these runs, including start-up on a busy machine

# The watch begins once rank 1 breaks and rank 0 waits for it: each of them may have been slow before.
LAUNCH = """
import sys
from pathlib import Path
from megarl.launcher.local import run_ranks
from megarl.parallel.watchdog import Monitor
from tests import warm
how, model, out, ranks_timeout_s, timeout_s = sys.argv[1:6]
check, breaking, begun = Monitor.check, Path(out) / "breaking", []

def check_once_broken(self):
    if not begun and breaking.exists() and "waits in collective" in self.describe(0):
        begun.append(True)
    return check(self) if begun else None

Monitor.check = check_once_broken
with warm.used():
    code = run_ranks("tests.distributed.health_worker", sys.argv[1:5], 2, Path(out), float(timeout_s))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def model(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3", tied=True, vocab_size=343)


@pytest.fixture(scope="module")
def broken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Three concurrent runs of two ranks; rank 1 of each breaks in a different way."""
    runs = {}
    for how in ("kill", "stop", "sleep"):
        out = tmp_path_factory.mktemp(how)
        runs[how] = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, how, str(model), str(out), str(RANKS_TIMEOUT_S), str(TIMEOUT_S)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    yield runs
    for run in runs.values():
        run.kill()
        run.wait(300)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("kill", r"megarl: rank 1 was killed by SIGKILL in stage update, (past|waits in) collective \d+, \w+ over "),
        ("stop", r"megarl: rank 1 does not run \(stopped or starved\); rank 1 in stage update, "),
        (
            "sleep",
            rf"megarl: rank 1 makes no progress \(parallel.timeout_s={TIMEOUT_S}\); rank 1 in stage update, past ",
        ),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_all_and_is_named(
    how: str, line: str, broken: dict[str, subprocess.Popen[str]]
) -> None:
    run = broken[how]
    children = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
    _, err = run.communicate(timeout=END_S)
    assert run.returncode not in (0, None)
    reports = [text for text in err.splitlines() if re.match(line, text)]
    assert len(reports) == 1, err
    assert "collective" in reports[0]
    if how != "kill":
        assert re.search(r"rank 0 in stage update, waits in collective \d+, \w+ over ", reports[0]), reports[0]
    assert still_running(children, 300) == []


@pytest.fixture(scope="module")
def poisoned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two ranks."""
    out = tmp_path_factory.mktemp("poison")
    code = run_ranks("tests.distributed.health_worker", ["poison", str(model), str(out), "0"], 2, out)
    assert code == 0, "\n".join(p.read_text()[-2000:] for p in out.glob("*.log"))
    return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_on_one_rank_makes_all_skip_the_step_and_changes_nothing(
    layout: str, poisoned: list[dict[str, Any]]
) -> None:
    for result in poisoned:
        rows = result[layout]["rows"]
        skips = [row for row in rows if "case" in row]
        assert len(skips) == (3 if layout == "pp2" else 4)
        assert all(row["skipped"] == 1.0 and row["untouched"] for row in skips), skips
        losses = [row["loss"] for row in rows if "case" not in row]
        assert losses == sorted(losses, reverse=True)  # the steps in between train on
        assert [row["skipped_steps"] for row in rows if "case" not in row] == [0.0] * len(losses)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_too_many_skipped_steps_in_a_row_stop_every_rank(layout: str, poisoned: list[dict[str, Any]]) -> None:
    for result in poisoned:
        skipped, message = result[layout]["stopped"]
        assert skipped == MAX_SKIPPED
        assert f"{MAX_SKIPPED + 1} steps in a row" in message
        assert f"actor.max_skipped_steps={MAX_SKIPPED}" in message


@pytest.mark.long
def test_without_a_launcher_a_rank_tells_that_another_hangs(model: Path, tmp_path: Path) -> None:
    """As under torchrun or srun. Rank 1 sleeps, and rank 0 watches it and exits with one line."""
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "MEGARL_RENDEZVOUS": str(tmp_path / "rendezvous"), "MEGARL_TEST_WATCH": str(tmp_path / "watch"),
        }  # fmt: skip
        arguments = ["sleep", str(model), str(tmp_path), str(TIMEOUT_S)]
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.health_worker", *arguments],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
        )
    try:
        _, err = ranks[0].communicate(timeout=END_S)
        assert ranks[0].returncode == EXIT_STUCK, err
        assert re.search(r"megarl: rank 1 makes no progress .*; rank 1 in stage update, past collective \d+", err), err
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
