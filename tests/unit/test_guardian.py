"""Nothing that a test process started outlives it, though its fixtures never close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import guardian

# A test process whose process in a session of its own has left its parent, as jobs of Slurm do.
TESTS = """
import os, subprocess, sys, time
from tests import guardian
os.environ[guardian.MARK] = "a-mark-of-" + str(os.getpid())
print(guardian.start(os.environ[guardian.MARK]), flush=True)
apart = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
start = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
subprocess.run([sys.executable, "-c", start, apart], check=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_what_has_left_its_parent_ends_with_the_test_process(number: signal.Signals) -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", TESTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=here) as process:
        assert process.stdout is not None
        guard, apart = (psutil.Process(int(process.stdout.readline())) for _ in range(2))
        assert apart.ppid() != process.pid
        assert guardian.marked(f"a-mark-of-{process.pid}")
        process.send_signal(number)
    _, alive = psutil.wait_procs([guard, apart], timeout=900)
    assert not alive


def test_a_process_that_ended_long_ago_is_no_reason_to_wait() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    guardian.watch(process.pid, "a-mark-of-nobody")
