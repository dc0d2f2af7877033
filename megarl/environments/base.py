"""The interface of an environment, and what its calls return."""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]  # {"role": ..., "content": ...}
Observation = str | Sequence[Message]


@dataclass(frozen=True)
class Step:
    """Outcome of a policy's answer.

    `observation` is the next turn that the policy reads, as a user's text or as messages; None if there is none to
    read. The rewards of an episode are added. If none of its steps gives one, `rewards.functions` score the episode.
    """

    observation: Observation | None = None
    reward: float | None = None
    done: bool = False


class Environment(abc.ABC):
    """A world that a policy acts in by its answers. One process has one, and plays episode after episode in it.

    Calls may block; the pool ends a process whose call takes too long. An exception costs the episode alone.
    """

    tools: Sequence[dict[str, Any]] = ()  # JSON schemas for the chat template's `tools`

    @abc.abstractmethod
    def reset(self, row: dict[str, Any]) -> Observation | None:
        """Begins an episode on a row of the data set.

        Returns the text that is added to the row's last message, messages that replace the row's, or None to leave
        them. Episodes of one row must begin equal: they are compared with each other.
        """

    @abc.abstractmethod
    def step(self, answer: str) -> Step:
        """Acts by the policy's answer, its text without special tokens."""

    def end(self) -> float | None:
        """Reward of an episode that ends before it is done, as no turn or no room is left."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases what it holds; called once, when its process ends: with the run, or after a lost episode.

        It may interrupt a `step` that takes too long. A process that crashes, or whose trainer is killed, ends without
        this call. So processes that an environment starts must end by themselves when its own process does.
        """


def package(name: str, pin: str) -> Any:
    """Imports a module of an adapter's package, which `pin` names with the version of pyproject.toml's extra.

    Raises:
        ImportError: it is missing; gives the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        raise ImportError(
            f"{name} is missing; {sys.executable} -m pip install {pin}, or name another interpreter by "
            "rollout.environment.python"
        ) from None
