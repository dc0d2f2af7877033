"""Environments in their own processes: what is slow, crashes or lies costs its episode alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import venv
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.environments.base import Step
from megarl.environments.config import EnvironmentConfig, GymnasiumConfig, McpConfig
from megarl.environments.pool import EnvironmentFault, EnvironmentPool
from megarl.knobs import UserError
from megarl.rollout.servers.sglang_server import still_running
from tests.clocks import put_forward
from tests.own_children import own_children

WORLDS = "tests.unit.environments.worlds"
COUNT = f"{WORLDS}.Count"
PROMPT = [{"role": "user", "content": "Count."}]
LIMIT_S = 400.0  # of a call; the clock is put forward where one is to take longer


def run(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(call(), 2 * LIMIT_S))


async def all_of(pool: EnvironmentPool, rows: list[dict[str, Any]], begun: Path) -> list[Any]:
    """Plays a step of each row at once. Time passes for the one that hangs when the others have ended."""
    episodes = [asyncio.ensure_future(play(pool, {**row, "begun": str(begun)}, "go")) for row in rows]
    await asyncio.wait([one for one, row in zip(episodes, rows, strict=True) if row.get("fault") != "hang"])
    while not begun.exists():
        await asyncio.sleep(0.01)
    put_forward(asyncio.get_running_loop(), LIMIT_S)
    return await asyncio.gather(*episodes, return_exceptions=True)


def processes() -> int:
    return len(own_children("megarl.environments.host", recursive=True))


async def play(pool: EnvironmentPool, row: dict[str, Any], *answers: str) -> tuple[Any, list[Step], float | None]:
    async with pool.lend() as playing:
        messages = await playing.reset(row)
        steps = [await playing.step(answer) for answer in answers]
        return messages, steps, await playing.end()


def test_an_episode_is_played_and_its_process_used_again() -> None:
    async def twice() -> None:
        for start in (4, 7):
            messages, steps, end = await play(
                pool, {"messages": PROMPT, "from": start, "answer": "stop", "end": 2}, "go", "stop"
            )
            assert messages == [{"role": "user", "content": f"Count.\n\nIt is {start}."}]
            assert steps[0] == Step([{"role": "user", "content": f"It is {start + 1}."}], 0.25, False)
            assert steps[1] == Step(None, 0.25, True)
            assert end == 2.0
        assert len(pool._live) == 1

    with EnvironmentPool(EnvironmentConfig(kind=COUNT)) as pool:
        run(twice)
        assert pool.report() == ""
    assert processes() == 0


FAULTS = {
    "raise in reset": ("failed", r"reset\(\) failed, ValueError: two lines"),
    "no text": ("failed", "the observation is a int; return text"),
    "long reset": ("lied", "has 300 characters, more than rollout.environment.max_observation_chars=200"),
    "hang": ("slow", r"step\(\) took longer than rollout.environment.time_limit_s=400"),
    "exit": ("died", r"its process died in step\(\)"),
    "memory": ("failed", "MemoryError"),
    "tuple": ("failed", r"step\(\) returned a tuple"),
    "number": ("failed", "the observation is a int"),
    "role": ("lied", "a message has a role of"),
    "silent": ("lied", r"step\(\) gave no observation, but the episode is not done"),
    "nan": ("lied", "the reward is nan, which is no finite number"),
    "text": ("failed", "the reward is the text '1', no number"),
    "complex": ("failed", "TypeError: .*complex"),
    "done": ("failed", "done is the text 'no', neither True nor False"),
    "bytes": ("failed", "the observation is a bytes; return text"),
    "no JSON": ("failed", "object is not JSON serializable"),
    "surrogate": ("lied", "the observation holds half of a surrogate pair"),
    "more keys": ("lied", "holds .*tool_calls.*; a message has a role of .*, a content of text, and nothing else"),
    "connection": ("lied", "answered [0-9]{19} bytes, more than rollout.environment.max_observation_chars=200"),
    "number on the connection": ("lied", r"step\(\) wrote into its pool's connection: 7"),
}


def test_each_fault_is_named_and_costs_its_episode_alone(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": PROMPT, "fault": fault} for fault in FAULTS]
    rows += [{"messages": PROMPT, "size": 300}, {"messages": PROMPT, "size": 10**7}, {"messages": PROMPT}]
    config = EnvironmentConfig(kind=COUNT, time_limit_s=LIMIT_S, max_processes=4, max_observation_chars=200)
    with EnvironmentPool(config) as pool:
        *faults, long, huge, good = run(lambda: all_of(pool, rows, tmp_path / "begun"))
        for (cause, message), fault in zip(FAULTS.values(), faults, strict=True):
            assert isinstance(fault, EnvironmentFault), fault
            assert fault.cause == cause
            assert pytest.raises(EnvironmentFault, match=message).matches(fault), fault
        assert "has 300 characters, more than rollout.environment.max_observation_chars=200" in str(long)
        assert "bytes, more than rollout.environment.max_observation_chars=200 can have" in str(huge)
        assert good[1] == [Step([{"role": "user", "content": "It is 1."}], 0.25, False)]
        report = pool.report()
        assert report.startswith("22 of 23 episodes were lost in the environment: 10 ")
        assert "10 failed, the first: " in report  # and 10 lied; the first of both is told first
        assert "10 lied, the first: " in report
        assert "1 slow, the first: step() took longer than" in report
        assert "\n" not in report


def test_a_forked_child_that_comes_back_does_not_answer_for_its_parent(capfd: Any) -> None:
    with EnvironmentPool(EnvironmentConfig(kind=COUNT)) as pool:
        _, steps, end = run(lambda: play(pool, {"messages": PROMPT, "fault": "fork", "end": 2}, "go", "go"))
        assert [step.observation for step in steps] == [[{"role": "user", "content": f"It is {n}."}] for n in (1, 2)]
        assert end == 2.0
        said, deadline = "", time.monotonic() + 300
        while f"a child that {COUNT} forked came back from step(); it is ended" not in said:
            assert time.monotonic() < deadline, said
            said += capfd.readouterr().err
            time.sleep(0.01)


def test_what_a_lost_episode_started_ends_even_in_a_session_of_its_own(tmp_path: Any) -> None:
    row = {"messages": PROMPT, "fault": "child", "pid": str(tmp_path / "pid")}
    with (
        EnvironmentPool(EnvironmentConfig(kind=COUNT)) as pool,
        pytest.raises(EnvironmentFault, match="a child is left"),
    ):
        run(lambda: play(pool, row, "go"))
    child = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # on a busy machine a child that was killed is to end yet
        assert still_running([psutil.Process(child)], 300) == []


def test_what_an_environment_prints_stays_out_of_the_runs_output(capfd: Any) -> None:
    with EnvironmentPool(EnvironmentConfig(kind=COUNT)) as pool:
        assert len(run(lambda: play(pool, {"messages": PROMPT, "fault": "print"}, "go"))[1]) == 1
    told = capfd.readouterr()
    assert told.out == ""
    assert "garbage" in told.err


def test_a_process_that_dies_between_episodes_costs_none() -> None:
    async def twice() -> None:
        await play(pool, {"messages": PROMPT}, "go")
        (idle,) = pool._idle
        os.kill(idle.pid, signal.SIGKILL)
        while not idle.reader.at_eof():
            await asyncio.sleep(0.01)
        assert len((await play(pool, {"messages": PROMPT}, "go"))[1]) == 1
        assert pool._live == set(pool._idle)

    with EnvironmentPool(EnvironmentConfig(kind=COUNT)) as pool:
        run(twice)
        assert pool.report() == ""


def test_a_cancelled_episode_ends_its_process_and_frees_its_place() -> None:
    async def cancel() -> list[Step]:
        hanging = asyncio.create_task(play(pool, {"messages": PROMPT, "fault": "hang"}, "go"))
        while not pool._live:
            await asyncio.sleep(0.01)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        return (await play(pool, {"messages": PROMPT}, "go"))[1]

    with EnvironmentPool(EnvironmentConfig(kind=COUNT, max_processes=1)) as pool:
        assert len(run(cancel)) == 1
        assert not pool.lost


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EnvironmentConfig(), "rollout.workflow=environment needs rollout.environment.kind"),
        (EnvironmentConfig(kind="gymnasum"), "did you mean gymnasium"),
        (EnvironmentConfig(kind="gymnasium"), "needs rollout.environment.gymnasium.id"),
        (EnvironmentConfig(kind="mcp"), "needs rollout.environment.mcp.command, to start a server, or .url"),
        (EnvironmentConfig(kind="mcp", mcp=McpConfig(command=["x"], url="http://x")), "give one of them"),
        (EnvironmentConfig(kind=COUNT, python="/no/python"), "python=/no/python is no program here"),
        (EnvironmentConfig(kind=COUNT, python="/bin/true"), "python=/bin/true is no Python interpreter"),
        (EnvironmentConfig(kind="no_module.Env"), "cannot start: ModuleNotFoundError: No module named 'no_module'"),
        (EnvironmentConfig(kind=f"{WORLDS}.Stranger"), "Stranger is no class derived from megarl.environments.base"),
        (EnvironmentConfig(kind=f"{WORLDS}.Broken"), "Broken cannot start: OSError: no room"),
        (EnvironmentConfig(kind=f"{WORLDS}.Dying"), "Dying cannot start: its process died"),
        (EnvironmentConfig(kind=f"{WORLDS}.Slow", start_limit_s=2.0), "not start within rollout.environment.start_lim"),
    ],
)
def test_an_environment_that_cannot_start_is_refused_in_one_line(config: EnvironmentConfig, message: str) -> None:
    with pytest.raises(UserError) as error:
        EnvironmentPool(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert processes() == 0


def test_a_missing_package_is_told_with_the_command_that_installs_it(tmp_path: Any) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    config = EnvironmentConfig(
        kind="gymnasium", python=str(bare / "bin" / "python"), gymnasium=GymnasiumConfig(id="Blackjack-v1")
    )
    with pytest.raises(UserError, match=r"gymnasium is missing; \S+/bare/bin/python -m pip install gymnasium=="):
        EnvironmentPool(config)


def test_another_interpreter_sees_none_of_this_ones_packages(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    (tmp_path / "bare_world.py").write_text(
        "import importlib.util, sys\n"
        "from megarl.environments.base import Environment, Step\n"
        "class World(Environment):\n"
        "    def reset(self, row): return f'{sys.prefix} {importlib.util.find_spec(\"torch\")}'\n"
        "    def step(self, answer): return Step(None, 1.0, True)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    with EnvironmentPool(EnvironmentConfig(kind="bare_world.World", python=python)) as pool:
        messages, _, _ = run(lambda: play(pool, {"messages": PROMPT}))
    assert messages[0]["content"] == f"Count.\n\n{tmp_path / 'bare'} None"
    assert sys.prefix not in messages[0]["content"]
