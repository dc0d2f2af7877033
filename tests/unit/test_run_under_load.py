"""`make test-load` keeps the load beside every round, and ends it."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests import run_under_load


def loops() -> list[psutil.Process]:
    """Busy processes of this one."""
    return [p for p in psutil.Process().children() if p.cmdline()[-1:] == [run_under_load.BUSY]]


@pytest.mark.parametrize("code", [0, 3])
def test_rounds_run_beside_the_load_until_one_fails(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import os, psutil, sys, time\n"
        "beside = lambda: [p for p in psutil.Process(os.getppid()).children() if p.cmdline()[-1] == sys.argv[2]]\n"
        "while len(beside()) < 2: time.sleep(0.01)\n"
        "open(sys.argv[1], 'a').write('.')\n"
        f"sys.exit({code})\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rounds"), run_under_load.BUSY]
    assert run_under_load.rounds_of(command, 3, 2) == code
    rounds = len((tmp_path / "rounds").read_text())
    assert rounds == (1 if code else 3)
    assert capsys.readouterr().out.count(" of 3: exit code ") == rounds
    assert loops() == []
