"""The recipes' worlds, played with the packages that they are for, on rows that the recipes make."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_adapters import HERE, call, free_port, play, python_with, serving, texts

from megarl import cli
from megarl.config import Config
from megarl.data.episodes import to_episode
from megarl.environments.config import EnvironmentConfig
from megarl.environments.pool import EnvironmentPool
from megarl.knobs import UserError

WORLDS = cli.ASSETS / "environments"
EXAMPLE = {"question": "Leo has 7 pens. Leo buys 1 more. How many pens?", "answer": "7+1=8\n#### 8"}


def recipe(name: str, *overrides: str) -> tuple[EnvironmentConfig, dict[str, Any]]:
    """A recipe's environment, and a row of its data."""
    config: Config = cli.load([f"+experiment={name}", *overrides])
    row = to_episode({"datasets": [{"options": config.train_dataset.options}]})(EXAMPLE)
    return config.rollout.environment, row


def calculated(environment: EnvironmentConfig, row: dict[str, Any]) -> None:
    answers = [call("calculate", a=7, operation="*", b=6), call("calculate", a=1, operation="/", b=1), "42"]
    _, steps, _ = play(environment, row, *answers)
    assert texts(steps)[0] == "42"
    assert texts(steps)[1].startswith("error: ")
    assert steps[2].done


def test_the_calculator_is_used_over_stdio() -> None:
    python = python_with("mcp.client.streamable_http", "mcp")
    calculated(*recipe("environment_mcp", f"rollout.environment.python={python}"))


def test_the_calculator_is_used_over_http() -> None:
    python = python_with("mcp.client.streamable_http", "mcp")
    with serving([python, str(WORLDS / "mcp_calculator.py")]) as port:
        url = f"rollout.environment.mcp.url=http://127.0.0.1:{port}/mcp"
        calculated(*recipe("environment_mcp_http", f"rollout.environment.python={python}", url))


def test_the_number_of_an_openenv_server_is_found_by_its_hints() -> None:
    python = python_with("openenv.core", "openenv")
    with serving([python, str(WORLDS / "openenv_higher_lower.py")]) as port:
        knobs = [
            f"rollout.environment.python={python}",
            f"rollout.environment.openenv.url=http://127.0.0.1:{port}",
        ]
        environment, row = recipe("environment_openenv", *knobs)
        number = row["seed"] % 9 + 1
        other = number % 9 + 1
        messages, steps, _ = play(environment, row, "none", f"{other}", f"I guess {number}.")
    assert messages[0]["content"] == "Play.\n\nGuess 1-9."
    assert texts(steps) == ["no number", "higher" if other < number else "lower"]
    assert [(step.reward, step.done) for step in steps] == [(-0.5, False), (-0.1, False), (1.0, True)]


def test_an_openenv_server_that_does_not_run_is_told_in_one_line() -> None:
    python = python_with("openenv.core", "openenv")
    url = f"rollout.environment.openenv.url=http://127.0.0.1:{free_port()}"
    environment, _ = recipe("environment_openenv", f"rollout.environment.python={python}", url)
    with pytest.raises(UserError, match=r"\Athe environment openenv cannot start: .*\Z"):
        EnvironmentPool(environment)


def test_a_sum_of_verifiers_is_scored_by_its_rubric() -> None:
    python = python_with("verifiers.v1", "verifiers")
    environment, row = recipe("environment_verifiers", f"rollout.environment.python={python}")
    a, b = row["task"] // 9 + 1, row["task"] % 9 + 1
    messages, steps, _ = play(environment, row, f"{a}+{b}={a + b}\n#### {a + b}")
    assert messages == [{"role": "user", "content": f"Leo has {a} pens. Leo buys {b} more. How many pens?"}]
    assert [(step.reward, step.done) for step in steps] == [(1.0, True)]
    assert [step.reward for step in play(environment, row, "no number")[1]] == [0.0]


def test_harbors_greeting_is_scored_by_its_tests(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "stand_in_docker.py"} {tmp_path} "$@"\n')
    docker.chmod(0o755)
    environment, row = recipe("environment_harbor", f"rollout.environment.harbor.docker={docker}")
    messages, steps, _ = play(environment, row, "```bash\necho hello > greeting.txt\n```", "Done.")
    assert messages[0]["content"].startswith("Write hello to greeting.txt.")
    assert [(step.reward, step.done) for step in steps] == [(None, False), (1.0, True)]
    assert [step.reward for step in play(environment, row, "Done.")[1]] == [0.0]
