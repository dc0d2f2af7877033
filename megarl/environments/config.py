"""Knobs of environments: which one, by what interpreter, and the limits of its processes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from megarl.knobs import MAX_COUNT, MAX_SECONDS, MAX_WEIGHT, UserError, check_ranges, does_not_exist, knob

KINDS = ("gymnasium", "openenv", "verifiers", "harbor", "mcp", "code")
LEAST_PYTHON = (3, 11)
PYTHON_DEADLINE_S = 60.0


@dataclass(frozen=True)
class GymnasiumConfig:
    """An environment of Gymnasium, or registered with it."""

    id: str = knob("", "name to make, such as FrozenLake-v1, or MODULE:NAME where a module registers it")
    arguments: dict[str, Any] = knob(factory=dict, meaning="arguments of gymnasium.make, such as {is_slippery: false}")
    actions: list[str] = knob(factory=list, meaning="names of a Discrete space's actions; empty: numbers")
    invalid_reward: float = knob(0.0, "reward of an answer that names no action", least=-MAX_WEIGHT, most=MAX_WEIGHT)


@dataclass(frozen=True)
class OpenEnvConfig:
    """A server of OpenEnv that runs already."""

    url: str = knob("", "address of the server, such as http://127.0.0.1:8000")
    action_field: str = knob("", "field of the action that takes the answer; empty: the answer is a JSON object")
    observation_field: str = knob("", "field of the observation that the policy reads; empty: all, as JSON")


@dataclass(frozen=True)
class VerifiersConfig:
    """A taskset of verifiers; a row's column `task` is a task's position in it."""

    taskset: str = knob("", "module of the taskset, as verifiers' --env.taskset.id, or its file")
    arguments: dict[str, Any] = knob(factory=dict, meaning="fields of the taskset's config")


@dataclass(frozen=True)
class HarborConfig:
    """Tasks of Harbor; a row's column `task` is a task's folder."""

    docker: str = knob("docker", "program that runs containers, with Docker's command line", path=True)
    command_limit_s: float = knob(60.0, "seconds that a command of the policy may take", above=0, most=MAX_SECONDS)
    max_output_chars: int = knob(
        4096, "characters of a command's output that the policy reads", least=1, most=MAX_COUNT
    )


@dataclass(frozen=True)
class McpConfig:
    """An MCP server whose tools the policy calls."""

    command: list[str] = knob(
        factory=list, meaning="program and arguments of a server over stdio; python is rollout.environment.python"
    )
    url: str = knob("", "address of a server over HTTP, such as http://127.0.0.1:8000/mcp")
    key_variable: str = knob("", "environment variable with the server's bearer key; url only")
    max_result_chars: int = knob(4096, "characters of a tool's result that the policy reads", least=1, most=MAX_COUNT)


@dataclass(frozen=True)
class CodeConfig:
    """Programs in the sandbox; a row's column `tests` has their tests."""

    good_enough: float = knob(1.0, "fraction of passed tests that ends the episode", above=0, most=1)
    show_tests: bool = knob(True, "show the policy the first test that fails")


@dataclass(frozen=True)
class EnvironmentConfig:
    """The environment of workflow=environment, and the limits of its processes."""

    kind: str = knob("", f"{', '.join(KINDS)}, or MODULE.CLASS of your own")
    python: str = knob("", "interpreter that runs the environment, Python 3.11 or later; empty: this one", path=True)
    max_turns: int = knob(8, "most answers of an episode", least=1, most=10_000)
    time_limit_s: float = knob(
        60.0, "seconds that a call of the environment may take; then its episode is lost", above=0, most=MAX_SECONDS
    )
    start_limit_s: float = knob(120.0, "seconds until the environment must have started", above=0, most=MAX_SECONDS)
    close_limit_s: float = knob(
        10.0, "seconds that close() may take; then the environment's process is killed", above=0, most=MAX_SECONDS
    )
    memory_limit_mb: int = knob(
        4096, "address space that an environment's process may add to its imports, in MiB", least=64, most=2**24
    )
    max_processes: int = knob(32, "processes, so episodes, at once; further episodes wait", least=1, most=4096)
    max_observation_chars: int = knob(
        65_536, "characters of an observation; with more, the episode is lost", least=1, most=MAX_COUNT
    )
    gymnasium: GymnasiumConfig = knob(factory=GymnasiumConfig, meaning="knobs of kind=gymnasium")
    openenv: OpenEnvConfig = knob(factory=OpenEnvConfig, meaning="knobs of kind=openenv")
    verifiers: VerifiersConfig = knob(factory=VerifiersConfig, meaning="knobs of kind=verifiers")
    harbor: HarborConfig = knob(factory=HarborConfig, meaning="knobs of kind=harbor")
    mcp: McpConfig = knob(factory=McpConfig, meaning="knobs of kind=mcp")
    code: CodeConfig = knob(factory=CodeConfig, meaning="knobs of kind=code")

    def __post_init__(self) -> None:
        check_ranges(self, "rollout.environment")

    def check(self) -> None:
        """Refuses an environment without a name, or without a knob that its kind needs.

        Raises:
            UserError: naming the knob.
        """
        if not self.kind:
            raise UserError(
                f"rollout.workflow=environment needs rollout.environment.kind: {', '.join(KINDS)}, or MODULE.CLASS"
            )
        if "." not in self.kind and self.kind not in KINDS:
            known = does_not_exist(f"rollout.environment.kind={self.kind}", self.kind, KINDS)
            raise UserError(f"{known}, and MODULE.CLASS of your own")
        needed = {
            "gymnasium.id": self.gymnasium.id,
            "openenv.url": self.openenv.url,
            "verifiers.taskset": self.verifiers.taskset,
        }
        if lacking := [name for name, value in needed.items() if name.partition(".")[0] == self.kind and not value]:
            raise UserError(f"rollout.environment.kind={self.kind} needs rollout.environment.{lacking[0]}")
        if self.kind == "mcp" and self.mcp.key_variable and self.mcp.key_variable not in os.environ:
            raise UserError(
                f"rollout.environment.mcp.key_variable={self.mcp.key_variable} is no environment variable here; export "
                "it with the server's key"
            )
        if self.kind == "mcp" and bool(self.mcp.command) == bool(self.mcp.url):
            raise UserError(
                "rollout.environment.kind=mcp needs rollout.environment.mcp.command, to start a server, or .url of one "
                "that runs; give one of them"
            )

    @property
    def gives_rewards(self) -> bool:
        """True if the environment may give rewards of its own, so that `rewards.functions` need not score."""
        return self.kind != "mcp"

    def options(self) -> dict[str, Any]:
        """Arguments of the adapter's `build`; a class of the user's takes none."""
        return dataclasses.asdict(self._own()) if self.kind in KINDS else {}

    def _own(self) -> Any:
        """Knobs of the kind."""
        return {
            "gymnasium": self.gymnasium,
            "openenv": self.openenv,
            "verifiers": self.verifiers,
            "harbor": self.harbor,
            "mcp": self.mcp,
            "code": self.code,
        }[self.kind]

    def interpreter(self) -> str:
        """Path of the interpreter that runs the environment.

        Raises:
            UserError: it is not there, does not start, or is too old.
        """
        if not self.python:
            return sys.executable
        what, found = f"rollout.environment.python={self.python}", shutil.which(self.python)
        if found is None:
            raise UserError(f"{what} is no program here; give the path of a python, such as VENV/bin/python")
        try:
            command = [found, "-c", "import sys; print(*sys.version_info[:2])"]
            told = subprocess.run(command, capture_output=True, text=True, timeout=PYTHON_DEADLINE_S).stdout.split()
            version = int(told[0]), int(told[1])
        except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
            raise UserError(
                f"{what} is no Python interpreter; give the path of one, such as VENV/bin/python"
            ) from error
        if version < LEAST_PYTHON:
            raise UserError(f"{what} is Python {version[0]}.{version[1]}; environments need 3.11 or later")
        return found
