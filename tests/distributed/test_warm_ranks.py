"""Processes from `tests/warm.py` end with a test process that is interrupted, terminated or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

# A command that starts two ranks, as the launcher does, and waits; started itself by a test process.
TESTS = """
import os, sys, time
from tests import warm
if __name__ == "__main__":
    warm.CONTEXT.set_forkserver_preload(["tests.warm", warm.SERVER])
    command = [sys.executable, "-m", "tests.distributed.sleeping_command", sys.argv[1]]
    process = warm.Popen(command, stdout=None, stderr=None, start_new_session=True)
    while len(open(sys.argv[1]).readlines()) < 3:
        time.sleep(0.05)
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "number",
    [*(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_nothing_outlives_the_test_process(number: signal.Signals, tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.touch()
    (tmp_path / "session.py").write_text(TESTS)
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "session.py"), str(started)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=here) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        family = psutil.Process(process.pid).children(recursive=True)
        pids = {int(line) for line in started.read_text().split()}
        assert pids <= {member.pid for member in family}
        assert len(family) > len(pids)  # the fork server
        process.send_signal(number)
    _, alive = psutil.wait_procs(family, timeout=900)
    assert not alive
