"""The pool's processes end with the run, also one killed without a chance to clean up."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.rollout.servers.sglang_server import still_running

DEADLINE_S = 240.0  # for a hang alone
SCORING = """
import asyncio, pathlib, sys, time
from megarl.rewards.pool import RewardConfig, RewardPool

mark = sys.argv[1]

def hang(prompt, completions, prompt_ids, completion_ids):
    pathlib.Path(mark).touch()
    time.sleep(1000)

async def score():
    await pool("", "", [], [])

with RewardPool([hang], RewardConfig(workers=1, max_workers=1, time_limit_s=1000.0)) as pool:
    asyncio.run(score())
"""
LOADING = """
import sys
from megarl.rewards.pool import RewardPool

class Slow:
    def __reduce__(self):
        return exec, (f"import pathlib, time; pathlib.Path({sys.argv[1]!r}).touch(); time.sleep(1000)",)

RewardPool([Slow()])
"""


@pytest.mark.parametrize(("script", "count"), [(SCORING, 2), (LOADING, 1)], ids=["a reward hangs", "loading hangs"])
def test_no_process_outlives_a_run_that_is_killed(script: str, count: int, tmp_path: Path) -> None:
    mark = tmp_path / "hangs"
    run = subprocess.Popen([sys.executable, "-c", script, str(mark)], cwd=Path(__file__).parents[3])
    process, processes, deadline = psutil.Process(run.pid), [], time.monotonic() + DEADLINE_S
    try:
        while not mark.exists() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        processes = process.children(recursive=True)
        assert mark.exists()
        assert len(processes) == count
        run.kill()
        run.wait(DEADLINE_S)
        assert still_running(processes, DEADLINE_S) == []
    finally:
        for left in [p for p in (*processes, process) if p.is_running()]:
            left.kill()
        run.wait(DEADLINE_S)
