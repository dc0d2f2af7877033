"""Plays an environment in its process: answers the calls of `EnvironmentPool` in JSON. Standard library only."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from megarl.environments.base import Environment, Step
from megarl.forks import receive, send

MAX_CAUSE = 500  # characters of an error
END = signal.SIGRTMAX  # the pool's signal to end a process; schedulers do not send it


class Ended(BaseException):
    """The pool ends this process; interrupts what the environment does."""


class Host:
    """Builds an environment and lets it play; pickled to the fork server that the environment's interpreter runs.

    `kind` is an adapter, `megarl.environments.KIND`, or MODULE.CLASS of the user's. `options` are the adapter's knobs.
    Failures of `close` are appended to the file `failures`, one line each.
    """

    def __init__(self, kind: str, options: dict[str, Any], failures: str) -> None:
        self.kind = kind
        self.options = options
        self.failures = failures
        self.environment: Environment | None = None
        self.playing = True

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
        """Answers calls until the pool ends this process, then closes the environment."""
        os.setpgid(0, 0)  # ends together with what the environment starts
        os.dup2(2, 1)  # what an environment prints stays out of the trainer's output
        signal.signal(END, self._end)
        with contextlib.suppress(Ended, ConnectionError):
            while (message := receive(connection)) is not None:
                send(connection, self._answered(json.loads(message)))
            self.playing = False
        if self.environment is not None:
            self._close(self.environment)

    def _end(self, *_: object) -> None:
        """Interrupts a call, and nothing that comes after it."""
        if self.playing:
            self.playing = False
            raise Ended

    def _close(self, environment: Environment) -> None:
        """Closes the environment, and writes down a failure."""
        try:
            environment.close()
        except (Exception, SystemExit) as error:
            with Path(self.failures).open("a", encoding="utf-8") as file:
                file.write(f"{_cause(error)}\n")

    def _answered(self, call: dict[str, Any]) -> bytes:
        """The answer to a call, or the error that it ends with. A child that the environment forked never returns."""
        pid = os.getpid()
        try:
            if self.environment is None:
                environment = self._class()(**self.options)
                if not isinstance(environment, Environment):
                    raise TypeError(f"{self.kind} built a {type(environment).__name__}, no Environment")
                self.environment = environment
            encoded = json.dumps(self._answer(self.environment, call)).encode()
        except (Exception, SystemExit) as error:
            encoded = json.dumps({"error": _cause(error)}).encode()
        if os.getpid() != pid:  # its answer would be taken for that of the next call
            print(f"a child that {self.kind} forked came back from {call['call']}(); it is ended", file=sys.stderr)
            os._exit(1)
        return encoded

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
            "done": _flag(step.done),
        }


def _cause(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CAUSE]


def _flag(done: Any) -> bool:
    """True if the episode is done.

    Raises:
        TypeError: it is text, which is always true.
    """
    if isinstance(done, str):
        raise TypeError(f"done is the text {done!r}, neither True nor False")
    return bool(done)


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
