"""Harbor's tasks: commands in the task's container, then the task's own tests give the reward.

The column `task` of a row is a task's folder: `instruction.md`, `task.toml`, `environment/Dockerfile` and tests. Their
script, test.sh in the folder `tests`, writes `/logs/verifier/reward.txt` or `reward.json`. The format is harbor 0.24's
(modules harbor.models.task.paths and harbor.models.trial.paths). Docker's command line plays it, so no package is
needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from megarl.environments.base import Environment, Message, Step

COMMAND = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)```", re.DOTALL)
TELLS = "\n\nWrite one command in a ```bash block to run it. Answer without a block when the task is done."


def require() -> None:
    """Needs no package."""


def build(docker: str, command_limit_s: float, max_output_chars: int) -> Environment:
    """Tasks in containers of the program `docker`.

    Raises:
        FileNotFoundError: there is no such program.
    """
    if shutil.which(docker) is None:
        raise FileNotFoundError(
            f"there is no program {docker}; install Docker, or set rollout.environment.harbor.docker"
        )
    return _Harbor(docker, command_limit_s, max_output_chars)


class _Harbor(Environment):
    def __init__(self, docker: str, command_limit_s: float, max_output_chars: int) -> None:
        self.docker = docker
        self.command_limit_s = command_limit_s
        self.max_output_chars = max_output_chars
        self.task = Path()
        self.container = ""
        self.holder: subprocess.Popen[bytes] | None = None
        self.episodes = 0

    def reset(self, row: dict[str, Any]) -> list[Message]:
        """Starts a new container of the task.

        Raises:
            FileNotFoundError: the folder lacks a part of a task.
            ValueError: the task has several steps or its own compose file.
        """
        self.close()
        self.task = Path(row["task"]).expanduser().absolute()
        for part in ("instruction.md", "task.toml", "tests/test.sh"):
            if not (self.task / part).is_file():
                raise FileNotFoundError(f"task={row['task']} has no {part}; give a folder of a Harbor task")
        config = tomllib.loads((self.task / "task.toml").read_text(encoding="utf-8"))
        if config.get("steps") or any((self.task / "environment").glob("docker-compose.y*ml")):
            raise ValueError(
                f"task={row['task']} has several steps or services; only a Dockerfile or an image is played"
            )
        self._start(config.get("environment", {}))
        return [{"role": "user", "content": (self.task / "instruction.md").read_text(encoding="utf-8") + TELLS}]

    def _start(self, environment: dict[str, Any]) -> None:
        """Starts the container. Its main process reads a pipe from this process, so both end together."""
        image = environment.get("docker_image") or self._build()
        self.episodes += 1
        mark = hashlib.sha256(f"{self.task} {id(self)} {self.episodes} {os.getpid()}".encode()).hexdigest()
        self.container = f"megarl-{mark[:24]}"
        limits = [f"--memory={environment['memory_mb']}m"] if environment.get("memory_mb") else []
        if environment.get("cpus"):
            limits.append(f"--cpus={environment['cpus']}")
        if environment.get("allow_internet") is False or environment.get("network_mode") == "no-network":
            limits.append("--network=none")
        for name, value in environment.get("env", {}).items():
            limits += ["--env", f"{name}={value}"]
        command = [self.docker, "run", "--rm", "-i", "--name", self.container, *limits, image]
        self.holder = subprocess.Popen(
            [*command, "sh", "-c", "mkdir -p /logs/verifier; echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.holder.stdout is not None
        if self.holder.stdout.readline().strip() != b"ready":
            raise RuntimeError(f"the container of {self.task.name} did not start; see docker's output above")

    def _build(self) -> str:
        """The image of the task's Dockerfile, built unless Docker has it."""
        tag = f"megarl-harbor-{hashlib.sha256(str(self.task).encode()).hexdigest()[:24]}"
        self._docker("build", "-q", "-t", tag, str(self.task / "environment"), check=True)
        return tag

    def step(self, answer: str) -> Step:
        commands = COMMAND.findall(answer)
        if not commands:
            return Step(None, self.end(), True)
        limit = f"{self.command_limit_s:g}"
        done = self._docker("exec", self.container, "timeout", limit, "bash", "-c", commands[-1])
        text = f"{done.stdout}{done.stderr}"[-self.max_output_chars :]
        return Step(f"exit code {done.returncode}\n{text}")

    def end(self) -> float:
        """Runs the task's tests, after what the policy left in their folders is removed.

        Raises:
            ValueError: they left no finite reward.
        """
        self._docker("exec", self.container, "rm", "-rf", "/logs/verifier", "/tests", check=True)
        self._docker("exec", self.container, "mkdir", "-p", "/logs/verifier", check=True)
        self._docker("cp", f"{self.task / 'tests'}/.", f"{self.container}:/tests", check=True)
        ran = self._docker("exec", self.container, "bash", "/tests/test.sh")
        for name in ("reward.json", "reward.txt"):
            found = self._docker("exec", self.container, "cat", f"/logs/verifier/{name}")
            if found.returncode == 0:
                value = json.loads(found.stdout)
                return float(sum(value.values()) if isinstance(value, dict) else value)
        raise ValueError(f"tests/test.sh left no /logs/verifier/reward.txt: {(ran.stderr or ran.stdout)[-200:]}")

    def close(self) -> None:
        """Ends the container, if one runs."""
        if self.holder is not None:
            self._docker("kill", self.container)
            self.holder.communicate()
            self.holder = None

    def _docker(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs a command of Docker. With `check`, a failure raises RuntimeError with its last line."""
        done = subprocess.run([self.docker, *arguments], capture_output=True, text=True, errors="replace")
        if check and done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"{self.docker} {arguments[0]} failed: {last}")
        return done
