"""The pool's processes end with the run, also one killed without a chance to clean up."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 120.0  # for a hang alone
SCORING = """
import asyncio
from megarl.rewards.pool import RewardConfig, RewardPool
from tests.unit.rewards.functions import double

async def hang():
    await pool("", "", [], [], i=1, what="hang")

with RewardPool([double], RewardConfig(workers=1, max_workers=1, time_limit_s=1000.0)) as pool:
    asyncio.run(hang())
"""
LOADING = """
import time
from megarl.rewards.pool import RewardPool

class Slow:
    def __reduce__(self):
        return time.sleep, (1000,)

RewardPool([Slow()])
"""


def descendants(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


@pytest.mark.parametrize(("script", "count"), [(SCORING, 2), (LOADING, 1)], ids=["a reward hangs", "loading hangs"])
def test_no_process_outlives_a_run_that_is_killed(script: str, count: int) -> None:
    run = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3])
    process, processes, deadline = psutil.Process(run.pid), [], time.monotonic() + DEADLINE_S
    try:
        while len(descendants(process)) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # to the call that hangs; the test holds without it too, but would prove less
        processes = descendants(process)
        assert len(processes) == count
        run.kill()
        run.wait(DEADLINE_S)
        _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
        assert not alive
    finally:
        for left in [p for p in (*processes, process) if p.is_running()]:
            left.kill()
