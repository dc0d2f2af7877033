"""Plays an environment in its process: answers the calls of `EnvironmentPool` in JSON. Standard library only."""

from __future__ import annotations

import importlib
import json
import os
import socket
from typing import Any

from megarl.environments.base import Environment, Step
from megarl.forks import receive, send

MAX_CAUSE = 500  # characters of an error


class Host:
    """Builds an environment and lets it play; pickled to the fork server that the environment's interpreter runs.

    `kind` is an adapter, `megarl.environments.KIND`, or MODULE.CLASS of the user's. `options` are the adapter's knobs.
    """

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self.kind = kind
        self.options = options

    def prepare(self) -> None:
        """Imports the environment's module and package."""
        self._class()

    def _class(self) -> Any:
        """The user's class, or the adapter's function that builds an environment."""
        module, _, name = self.kind.rpartition(".")
        if module:
            found = getattr(importlib.import_module(module), name)
            if not (isinstance(found, type) and issubclass(found, Environment)):
                raise TypeError(f"{self.kind} is no class derived from megarl.environments.base.Environment")
            return found
        adapter = importlib.import_module(f"megarl.environments.{name}_adapter")
        adapter.require()
        return adapter.build

    def serve(self, connection: socket.socket) -> None:
        """Answers calls until the pool closes."""
        os.setpgid(0, 0)  # ends together with what the environment starts
        environment: Environment | None = None
        while (message := receive(connection)) is not None:
            call = json.loads(message)
            try:
                if environment is None:
                    environment = self._class()(**self.options)
                    if not isinstance(environment, Environment):
                        raise TypeError(f"{self.kind} built a {type(environment).__name__}, no Environment")
                answer = self._answer(environment, call)
                encoded = json.dumps(answer).encode()
            except (Exception, SystemExit) as error:
                cause = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CAUSE]
                encoded = json.dumps({"error": cause}).encode()
            send(connection, encoded)
        if environment is not None:
            environment.close()

    def _answer(self, environment: Environment, call: dict[str, Any]) -> dict[str, Any]:
        if call["call"] == "start":
            return {"tools": list(environment.tools)}
        if call["call"] == "reset":
            return {"observation": _messages(environment.reset(call["row"]))}
        if call["call"] == "end":
            return {"reward": _number(environment.end())}
        step = environment.step(call["answer"])
        if not isinstance(step, Step):
            raise TypeError(f"step() returned a {type(step).__name__}; return a megarl.environments.base.Step")
        return {
            "observation": _messages(step.observation),
            "reward": _number(step.reward),
            "done": bool(step.done),
        }


def _number(reward: Any) -> float | None:
    """A reward that JSON can hold; the pool checks that it is finite.

    Raises:
        TypeError: it is no number.
    """
    if isinstance(reward, str):
        raise TypeError(f"the reward is the text {reward!r}, no number")
    return None if reward is None else float(reward)


def _messages(observation: Any) -> Any:
    """An observation that JSON can hold; the pool checks its form.

    Raises:
        TypeError: it is neither text, messages nor None.
    """
    if observation is None or isinstance(observation, str):
        return observation
    if isinstance(observation, list | tuple) and all(isinstance(message, dict) for message in observation):
        return list(observation)
    raise TypeError(f"the observation is a {type(observation).__name__}; return text, a list of messages or None")
