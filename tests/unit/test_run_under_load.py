"""`make test-load` keeps the load beside every round, and ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import run_under_load


def loops(pid: int) -> int:
    """Number of busy processes that a process has started. Others of it may have ended, and wait to be reaped."""
    running = [p for p in psutil.Process(pid).children() if p.status() != psutil.STATUS_ZOMBIE]
    return sum(p.cmdline()[-1:] == [run_under_load.BUSY] for p in running)


@pytest.mark.parametrize("code", [0, 3])
def test_rounds_run_beside_the_load_until_one_fails(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import os, sys, time\n"
        "from tests.unit.test_run_under_load import loops\n"
        "while loops(os.getppid()) < 2: time.sleep(0.01)\n"
        "open(sys.argv[1], 'a').write('.')\n"
        f"sys.exit({code})\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rounds")]
    with subprocess.Popen(["true"]):  # a process that has ended, and is not reaped yet
        assert run_under_load.rounds_of(command, 3, 2) == code
    rounds = len((tmp_path / "rounds").read_text())
    assert rounds == (1 if code else 3)
    assert capsys.readouterr().out.count(" of 3: exit code ") == rounds
    assert loops(os.getpid()) == 0
