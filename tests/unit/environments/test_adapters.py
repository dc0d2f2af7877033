"""Adapters against the packages that they are for; MEGARL_ENVIRONMENT_PYTHONS names interpreters that have them."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.environments import code_adapter
from megarl.environments.base import Step
from megarl.environments.config import (
    CodeConfig,
    EnvironmentConfig,
    GymnasiumConfig,
    HarborConfig,
    McpConfig,
    OpenEnvConfig,
    VerifiersConfig,
)
from megarl.environments.gymnasium_adapter import _Gymnasium
from megarl.environments.pool import EnvironmentFault, EnvironmentPool
from megarl.knobs import UserError
from megarl.sandbox import client

HERE = Path(__file__).parent
PROMPT = [{"role": "user", "content": "Play."}]
VARIABLE = "MEGARL_ENVIRONMENT_PYTHONS"  # interpreters, separated by colons
DEADLINE_S = 300.0


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((HERE.parents[2] / "pyproject.toml").read_text())["project"]
    return dict(project["optional-dependencies"])


@functools.cache
def python_with(module: str, extra: str) -> str:
    """An interpreter that has `module`: this one, or one of those named in the environment. Skips the test if none."""
    for python in [sys.executable, *filter(None, os.environ.get(VARIABLE, "").split(":"))]:
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        if subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL, timeout=DEADLINE_S).returncode == 0:
            return python
    (pin,) = extras()[extra]
    pytest.skip(f"no {module}: python -m venv DIR; DIR/bin/pip install {pin}; export {VARIABLE}=DIR/bin/python")


def play(config: EnvironmentConfig, row: dict[str, Any], *answers: str) -> tuple[Any, list[Step], float | None]:
    async def episode() -> Any:
        async with pool.lend() as playing:
            messages = await playing.reset(row)
            return messages, [await playing.step(answer) for answer in answers], await playing.end()

    with EnvironmentPool(replace(config, time_limit_s=DEADLINE_S)) as pool:  # a call may start several processes
        return asyncio.run(asyncio.wait_for(episode(), 2 * DEADLINE_S))


def texts(steps: list[Step]) -> list[str]:
    return [message["content"] for step in steps for message in step.observation or ()]  # type: ignore[misc]


@pytest.mark.parametrize("name", ["gymnasium", "openenv", "verifiers", "mcp"])
def test_the_command_that_a_missing_package_is_told_with_has_the_extras_version(name: str) -> None:
    adapter = importlib.import_module(f"megarl.environments.{name}_adapter")
    assert extras()[name] == [adapter.PIN]


# -- gymnasium -------------------------------------------------------------------------------------------------------


def gymnasium(**options: Any) -> EnvironmentConfig:
    python = python_with("gymnasium", "gymnasium")
    return EnvironmentConfig(kind="gymnasium", python=python, gymnasium=GymnasiumConfig(**options))


def test_gymnasiums_frozen_lake_is_walked_by_named_actions() -> None:
    config = gymnasium(
        id="FrozenLake-v1",
        arguments={"is_slippery": False},
        actions=["left", "down", "right", "up"],
        invalid_reward=-0.5,
    )
    way = ["down", "go down", "right", "not up but right", "somewhere", "down", "right"]
    messages, steps, end = play(config, {"messages": PROMPT, "seed": 1}, *way)
    assert messages == [{"role": "user", "content": "Play.\n\n0"}]
    assert texts(steps) == ["4", "8", "9", "10", "This is no action. Actions: left, down, right, up", "14"]
    assert [step.reward for step in steps] == [0, 0, 0, 0, -0.5, 0, 1]
    assert [step.done for step in steps] == [False] * 6 + [True]
    assert end is None


def test_gymnasiums_episodes_of_a_row_begin_equal_and_continuous_actions_are_read() -> None:
    config = gymnasium(id="MountainCarContinuous-v0")
    first, steps, _ = play(config, {"messages": PROMPT, "row": 1}, "I push 0.25.", "2.0")
    again, _, _ = play(config, {"messages": PROMPT, "row": 1})
    other, _, _ = play(config, {"messages": PROMPT, "row": 2})
    assert first == again != other
    assert steps[0].reward == pytest.approx(-0.1 * 0.25**2)  # the environment's cost of a push
    assert "This is no action. Actions: Box(-1.0, 1.0" in texts(steps)[1]


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("hit", 0),
        ("The card is white, so I stand", 2),
        ("I stand on white", 2),
        ("turn left", 1),
        ("left, then turn left.", 1),
        ("turn left, or left", 3),
        ("white", None),
        ("a -> b", 4),
    ],
)
def test_a_name_is_read_as_a_whole_word_and_the_longer_one_first(answer: str, action: int | None) -> None:
    names = ["hit", "turn left", "stand", "left", "->"]
    assert read(answer, "Discrete", names, n=5, start=0) == action


def read(answer: str, kind: str, actions: Sequence[str] = (), **space: Any) -> Any:
    """The action of an answer; a bare space stands for the package's, whose `contains` is not asked here."""
    made = SimpleNamespace(action_space=type(kind, (SimpleNamespace,), {"contains": lambda *_: True})(**space))
    return _Gymnasium(made, list(actions), 0.0)._action(answer)


@pytest.mark.parametrize("answer", ["1e999", "-1e999", "1e30", "300", "0.5", "no number"])
def test_a_number_that_the_space_cannot_hold_is_no_action(answer: str) -> None:
    for kind in ("MultiDiscrete", "Box"):
        assert read(answer, kind, dtype=np.dtype(np.int8), shape=(1,)) is None
        assert read("7", kind, dtype=np.dtype(np.int8), shape=(1,)).tolist() == [7]


def test_a_number_beyond_a_space_of_fractions_is_no_action() -> None:
    assert read("1e39", "Box", dtype=np.dtype(np.float32), shape=(1,)) is None
    assert read("1e38", "Box", dtype=np.dtype(np.float32), shape=(1,)) is not None
    assert read("1e999", "Discrete", n=5, start=0) is None
    assert read("-2 or 3", "Discrete", n=5, start=0) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "Nothing-v9"}, "cannot start: NameNotFound"),
        ({"id": "FrozenLake-v1", "actions": ["a"]}, r"actions has 1 names, and the action space is Discrete\(4\)"),
        ({"id": "FrozenLake-v1", "arguments": {"colour": 1}}, "cannot start: TypeError: .*colour"),
    ],
)
def test_a_gymnasium_that_cannot_be_made_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EnvironmentPool(gymnasium(**options))


# -- code ------------------------------------------------------------------------------------------------------------


def test_code_is_tested_in_the_sandbox_and_its_reward_is_the_last_fraction() -> None:
    row = {"messages": PROMPT, "tests": ["assert add(1, 2) == 3", {"input": "", "output": ""}]}
    config = EnvironmentConfig(kind="code", code=CodeConfig())
    messages, steps, _ = play(config, row, "def add(a, b): return 1", "```python\ndef add(a, b): return a + b\n```")
    assert messages == PROMPT
    assert texts(steps)[0].startswith("'assert add(1, 2) == 3' fails (failed): ")
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (0.5, True)]
    hidden = EnvironmentConfig(kind="code", code=CodeConfig(show_tests=False))
    assert "assert" not in texts(play(hidden, row, "x = 1")[1])[0].split(":")[0]


def test_a_test_that_gets_its_processor_time_late_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's own limit is the only one in wall time."""
    monkeypatch.setattr(client, "LEAST_WALL_S", 0.2)
    monkeypatch.setattr(client, "WALL_PER_CPU_S", 0.0)
    played = code_adapter.build(1.0, True)
    played.reset({"tests": [{"input": "", "output": "7"}, "assert done"]})
    step = played.step("import time\nwhile time.process_time() < 1.0: pass\ndone = True\nprint(7)")
    assert (step.reward, step.done) == (1.0, True)


# -- MCP -------------------------------------------------------------------------------------------------------------


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played_by_mcp(config: McpConfig, python: str) -> None:
    answers = [
        call("add", a=1, b=2) + call("add", a=2, b=2),
        call("fail"),
        call("sub"),
        "<tool_call>1</tool_call>",
        "3",
    ]
    _, steps, _ = play(EnvironmentConfig(kind="mcp", python=python, mcp=config), {"messages": PROMPT}, *answers)
    assert texts(steps) == [
        "3",
        "4",
        "error: Error executing tool fail",
        "error: there is no tool sub; there are add, fail",
        'error: a call is {"name": ..., "arguments": {...}}',
    ]
    assert [(step.reward, step.done) for step in steps] == [(None, False)] * 4 + [(None, True)]


def test_an_mcp_server_over_stdio_is_started_and_called() -> None:
    python = python_with("mcp.client.streamable_http", "mcp")
    config = McpConfig(command=[python, str(HERE / "mcp_server.py"), "stdio"])
    played_by_mcp(config, python)
    with EnvironmentPool(EnvironmentConfig(kind="mcp", python=python, mcp=config)) as pool:
        (add, _) = pool.tools
    assert add["function"]["name"] == "add"
    assert set(add["function"]["parameters"]["properties"]) == {"a", "b"}


def test_an_mcp_server_over_http_is_called() -> None:
    python = python_with("mcp.client.streamable_http", "mcp")
    with serving([python, str(HERE / "mcp_server.py"), "streamable-http"]) as port:
        played_by_mcp(McpConfig(url=f"http://127.0.0.1:{port}/mcp"), python)


def test_an_mcp_server_that_does_not_start_is_refused() -> None:
    python = python_with("mcp.client.streamable_http", "mcp")
    for config in (McpConfig(command=["/bin/false"]), McpConfig(url=f"http://127.0.0.1:{free_port()}/mcp")):
        with pytest.raises(UserError, match="the environment mcp cannot start: "):
            EnvironmentPool(EnvironmentConfig(kind="mcp", python=python, mcp=config))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def serving(command: list[str]) -> Iterator[int]:
    """Runs a server on a free port of this machine, which it gets as its last argument, until it answers HTTP."""
    port, end = free_port(), time.monotonic() + DEADLINE_S
    with subprocess.Popen([*command, str(port)]) as process:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=300)
                    break
                except urllib.error.HTTPError:
                    break
                except OSError:
                    assert process.poll() is None, "the server ended"
                    assert time.monotonic() < end, "the server did not answer"
                    time.sleep(0.1)
            yield port
        finally:
            process.kill()


# -- OpenEnv ---------------------------------------------------------------------------------------------------------


def test_an_openenv_server_is_played() -> None:
    python = python_with("openenv.core", "openenv")
    with serving([python, str(HERE / "openenv_server.py")]) as port:
        url = f"http://127.0.0.1:{port}"
        config = OpenEnvConfig(url=url, action_field="guess", observation_field="hint")
        row = {"messages": PROMPT, "seed": 7}
        messages, steps, _ = play(EnvironmentConfig(kind="openenv", python=python, openenv=config), row, "3", "7")
        assert messages[0]["content"] == "Play.\n\nGuess."
        assert [(step.reward, step.done) for step in steps] == [(0.0, False), (1.0, True)]
        assert texts(steps) == ["more"]
        whole = EnvironmentConfig(kind="openenv", python=python, openenv=OpenEnvConfig(url=url))
        messages, steps, _ = play(whole, row, "no json", '{"guess": "9"}')
        assert json.loads(messages[0]["content"].partition("\n\n")[2])["hint"] == "Guess."
        assert texts(steps)[0] == "error: an action is a JSON object"
        assert json.loads(texts(steps)[1])["hint"] == "less"


# -- verifiers -------------------------------------------------------------------------------------------------------


def test_a_taskset_of_verifiers_is_played_and_scored_by_its_rubric(monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_with("verifiers.v1", "verifiers")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    config = EnvironmentConfig(
        kind="verifiers", python=python, verifiers=VerifiersConfig(taskset="sums_taskset", arguments={"count": 2})
    )

    async def episodes() -> list[Any]:
        async def one(task: int, answer: str) -> Any:
            async with pool.lend() as playing:
                return await playing.reset({"task": task}), await playing.step(answer)

        answers = [(1, "2"), (1, "3"), (0, "100000"), (2, "3")]
        return await asyncio.gather(*(one(*answer) for answer in answers), return_exceptions=True)

    with EnvironmentPool(config) as pool:
        *played, outside = asyncio.run(asyncio.wait_for(episodes(), DEADLINE_S))
    assert played[0][0] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1=?"}]
    assert [step for _, step in played] == [Step(None, reward, True) for reward in (1.5, 0.5, 0.0)]
    assert isinstance(outside, EnvironmentFault)
    assert "task=2: the taskset has 2 tasks" in str(outside)


# -- Harbor ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task in Harbor's format: write hello into a file of the container."""
    files = {
        "instruction.md": "Write hello to greeting.txt.",
        "task.toml": '[environment]\ndocker_image = "debian"\nmemory_mb = 512\n',
        "environment/Dockerfile": "FROM debian\n",
        "tests/test.sh": 'grep -q hello greeting.txt && echo 1 > "$ROOT/logs/verifier/reward.txt"'
        ' || echo 0 > "$ROOT/logs/verifier/reward.txt"\n',
    }
    for name, text in files.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    return tmp_path / "task"


def harbor(tmp_path: Path, command_limit_s: float = 300.0) -> EnvironmentConfig:
    """`docker` is a stand-in: commands run in a folder of this machine. It covers images and isolation, not megarl."""
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "stand_in_docker.py"} {tmp_path} "$@"\n')
    docker.chmod(0o755)
    return EnvironmentConfig(kind="harbor", harbor=HarborConfig(docker=str(docker), command_limit_s=command_limit_s))


def test_a_task_of_harbor_is_played_and_scored_by_its_tests(task: Path, tmp_path: Path) -> None:
    config, row = harbor(tmp_path), {"task": str(task)}
    write = "I write it.\n```bash\necho hello > greeting.txt; echo written\n```"
    messages, steps, _ = play(config, row, write, "Done.")
    assert messages[0]["content"].startswith("Write hello to greeting.txt.\n\nWrite one command in a ```bash block")
    assert texts(steps) == ["exit code 0\nwritten\n"]
    assert [(step.reward, step.done) for step in steps] == [(None, False), (1.0, True)]
    assert play(config, row, "Done.")[1] == [Step(None, 0.0, True)]
    assert play(config, row, write)[2] == 1.0  # cut off before it was done: the tests decide
    limited = harbor(tmp_path, command_limit_s=2.0)
    assert texts(play(limited, row, "```sh\nsleep 1000\n```")[1]) == ["exit code 124\n"]


def test_a_reward_or_test_that_the_policy_wrote_does_not_count(task: Path, tmp_path: Path) -> None:
    forged = """```bash
mkdir -p "$ROOT/tests"; touch "$ROOT/tests/forged"
echo 1 > "$ROOT/logs/verifier/reward.json"
```"""
    with (task / "tests" / "test.sh").open("a") as script:
        script.write('test -e "$ROOT/tests/forged" && echo 1 > "$ROOT/logs/verifier/reward.txt"; true\n')
    assert play(harbor(tmp_path), {"task": str(task)}, forged, "Done.")[1][1] == Step(None, 0.0, True)


def test_a_folder_that_is_no_task_costs_its_episode(task: Path, tmp_path: Path) -> None:
    (task / "task.toml").unlink()
    with pytest.raises(EnvironmentFault, match=r"has no task\.toml; give a folder of a Harbor task"):
        play(harbor(tmp_path), {"task": str(task)})


def test_harbor_without_docker_is_refused() -> None:
    config = EnvironmentConfig(kind="harbor", harbor=HarborConfig(docker="no-docker-here"))
    with pytest.raises(UserError, match="there is no program no-docker-here; install Docker"):
        EnvironmentPool(config)
