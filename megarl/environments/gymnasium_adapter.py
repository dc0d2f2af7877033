"""Gymnasium's environments: an answer is read as an action of the environment's space."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

from megarl.environments.base import Environment, Step, package

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
MAX_SEED = 2**31

PIN = "gymnasium==1.4.0"


def require() -> None:
    """Refuses an interpreter without Gymnasium."""
    package("gymnasium", PIN)


def build(id: str, arguments: dict[str, Any], actions: Sequence[str], invalid_reward: float) -> Environment:
    """The environment `id`, with names for the actions of a `Discrete` space."""
    made = package("gymnasium", PIN).make(id, **{"render_mode": None, **arguments})
    return _Gymnasium(made, list(actions), invalid_reward)


class _Gymnasium(Environment):
    def __init__(self, made: Any, actions: list[str], invalid_reward: float) -> None:
        self.made = made
        self.actions = actions
        self.names = _names(actions)
        self.invalid_reward = invalid_reward
        self.space = made.action_space
        self.kind = type(self.space).__name__
        if self.kind not in ("Discrete", "MultiDiscrete", "Box", "Text"):
            raise ValueError(f"its actions are a {self.kind}; Discrete, MultiDiscrete, Box and Text can be read")
        if actions and (self.kind != "Discrete" or len(actions) != self.space.n):
            raise ValueError(f"actions has {len(actions)} names, and the action space is {self.space}")

    def reset(self, row: dict[str, Any]) -> str:
        """Begins with the row's `seed`, or with one made from the row, so that a group's episodes begin equal."""
        seed = row["seed"] if "seed" in row else zlib.crc32(repr(sorted(row.items())).encode()) % MAX_SEED
        observation, _ = self.made.reset(seed=int(seed))
        return self._text(observation)

    def step(self, answer: str) -> Step:
        action = self._action(answer)
        if action is None:
            actions = ", ".join(self.actions) if self.actions else str(self.space)
            return Step(f"This is no action. Actions: {actions}", self.invalid_reward)
        observation, reward, terminated, truncated, _ = self.made.step(action)
        return Step(self._text(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        self.made.close()

    def _text(self, observation: Any) -> str:
        """The environment's own text where it renders any, else the observation."""
        if self.made.render_mode == "ansi":
            return str(self.made.render())
        if isinstance(observation, tuple):
            return ", ".join(str(getattr(part, "tolist", lambda p=part: p)()) for part in observation)
        return str(getattr(observation, "tolist", lambda: observation)())

    def _action(self, answer: str) -> Any:
        """The last action that the answer names; None if there is none."""
        if self.kind == "Text":
            return answer if self.space.contains(answer) else None
        if self.actions:
            named = self.names.findall(answer)
            return self.space.start + self.actions.index(named[-1]) if named else None
        import numpy as np

        dtype, shape = (np.dtype(np.int64), ()) if self.kind == "Discrete" else (self.space.dtype, self.space.shape)
        whole, size = np.issubdtype(dtype, np.integer), int(np.prod(shape))
        limits = np.iinfo(dtype) if whole else np.finfo(dtype)
        numbers = [float(number) for number in NUMBER.findall(answer)][-size:]
        # Python compares whole numbers and fractions exactly. Infinity is outside all limits.
        least, most = (limits.min, limits.max) if whole else (float(limits.min), float(limits.max))
        if len(numbers) < size or not all(least <= n <= most for n in numbers):
            return None
        if whole and not all(n.is_integer() for n in numbers):
            return None
        chosen = np.array(numbers, dtype).reshape(shape)[()]
        return chosen if self.space.contains(chosen) else None


def _names(actions: Sequence[str]) -> re.Pattern[str]:
    """Finds actions as whole words; of two that begin at one place, the longer."""
    longest_first = sorted(actions, key=len, reverse=True)
    return re.compile(
        "|".join(
            (r"\b" if re.match(r"\w", name) else "") + re.escape(name) + (r"\b" if re.search(r"\w$", name) else "")
            for name in longest_first
        )
    )
