"""The end of an environment: it is closed once, by a deadline, and a close that fails costs nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_environment_pool import COUNT, LIMIT_S, PROMPT, WORLDS, all_of, play, processes, run

from megarl.environments.config import EnvironmentConfig
from megarl.environments.pool import EnvironmentFault, EnvironmentPool
from megarl.rollout.servers.sglang_server import still_running

ENDS = {"": 1, "nan": 1, "raise in reset": 1, "hang": 1, "exit": 0}  # fault -> how often the environment is closed


async def lose(pool: EnvironmentPool, **row: Any) -> None:
    with pytest.raises(EnvironmentFault):
        await play(pool, {"messages": PROMPT, "fault": "nan", **row}, "go")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "close()" in record.getMessage()]


def test_an_environment_is_closed_once_however_its_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    rows = [{"messages": PROMPT, "fault": fault, "mark": str(marks / f"mark {fault}")} for fault in ENDS]
    with EnvironmentPool(EnvironmentConfig(kind=COUNT, time_limit_s=LIMIT_S, close_limit_s=300.0)) as pool:
        run(lambda: all_of(pool, rows, tmp_path / "begun"))
    closed = {path.name: path.read_text() for path in marks.iterdir()}
    assert closed == {f"mark {fault}": "closed\n" for fault, times in ENDS.items() if times}
    assert processes() == 0
    assert warnings(caplog) == []


def test_a_cancelled_episode_closes_its_environment(tmp_path: Path) -> None:
    async def cancel() -> None:
        begun = asyncio.Event()

        async def hang() -> None:
            async with pool.lend() as playing:
                await playing.reset({"messages": PROMPT, "fault": "hang", "mark": str(tmp_path / "mark")})
                begun.set()
                await playing.step("go")

        hanging = asyncio.create_task(hang())
        await begun.wait()
        await asyncio.sleep(0.1)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)

    with EnvironmentPool(EnvironmentConfig(kind=COUNT, close_limit_s=300.0)) as pool:
        run(cancel)
    assert (tmp_path / "mark").read_text() == "closed\n"


def test_a_close_that_hangs_or_raises_is_named_once_and_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def episodes() -> None:
        for close, limit_s in (("raise", 300.0), ("raise", 300.0), ("hang", 1.0)):
            pool._ends._limit_s = limit_s
            await lose(pool, close=close)
            while pool._live:  # until it is closed
                await asyncio.sleep(0.01)
        pool._ends._limit_s = 300.0
        await play(pool, {"messages": PROMPT, "close": "raise"}, "go")
        await lose(pool)

    with EnvironmentPool(EnvironmentConfig(kind=COUNT, close_limit_s=300.0)) as pool:
        run(episodes)
    assert sorted(warnings(caplog)) == [
        f"the environment {COUNT}: close() failed, OSError: two lines\\x9b31m; its process is ended",
        f"the environment {COUNT}: close() took longer than rollout.environment.close_limit_s=1; its process is ended",
    ]
    assert pool.lost == {"lied": 4}
    assert processes() == 0


def test_an_episode_waits_for_the_place_of_an_environment_that_still_closes() -> None:
    async def two() -> int:
        await lose(pool, close="hang")
        (closing,) = [psutil.Process(process.pid) for process in pool._live]
        async with pool.lend() as playing:
            await playing.reset({"messages": PROMPT})
            assert len(pool._live) == 1
            assert still_running([closing], 300) == []
            return processes()

    with EnvironmentPool(EnvironmentConfig(kind=COUNT, close_limit_s=1.0, max_processes=1)) as pool:
        assert run(two) == 2, "the fork server, and one environment"


def test_a_lost_episode_does_not_wait_for_the_close_of_its_environment() -> None:
    async def one() -> int:
        await lose(pool, close="hang")
        count = processes()
        for process in pool._live:
            os.kill(process.pid, signal.SIGKILL)
        return count

    with EnvironmentPool(EnvironmentConfig(kind=COUNT, close_limit_s=300.0)) as pool:
        assert run(one) == 2, "the fork server, and the environment that still closes"


def test_the_trial_at_the_start_closes_its_environment(caplog: pytest.LogCaptureFixture) -> None:
    with EnvironmentPool(EnvironmentConfig(kind=f"{WORLDS}.Unclosable", close_limit_s=300.0)):
        assert processes() == 1
        assert "close() failed, OSError: two lines\\x9b31m" in warnings(caplog)[0]
