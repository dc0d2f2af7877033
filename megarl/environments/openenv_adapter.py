"""OpenEnv's servers: `reset` and `step` over a WebSocket, by the client of the package `openenv`."""

from __future__ import annotations

import json
from typing import Any

from megarl.environments.base import Environment, Step, package

PIN = "openenv==0.10.0"


def require() -> None:
    """Refuses an interpreter without OpenEnv."""
    package("openenv.core", PIN)


def build(url: str, action_field: str, observation_field: str) -> Environment:
    """A session with the server at `url`."""
    client = package("openenv.core", PIN).GenericEnvClient(base_url=url).sync()
    client.connect()
    return _OpenEnv(client, action_field, observation_field)


class _OpenEnv(Environment):
    def __init__(self, client: Any, action_field: str, observation_field: str) -> None:
        self.client = client
        self.action_field = action_field
        self.observation_field = observation_field

    def reset(self, row: dict[str, Any]) -> str:
        """Begins with the row's `seed`, if it has one.

        Raises:
            ValueError: the server says that the episode is done before the first action.
        """
        result = self.client.reset(**({"seed": int(row["seed"])} if "seed" in row else {}))
        if result.done:
            raise ValueError("reset() is done before the first action")
        return self._text(result.observation)

    def step(self, answer: str) -> Step:
        action: Any = {self.action_field: answer}
        if not self.action_field:
            try:
                action = json.loads(answer)
            except (json.JSONDecodeError, RecursionError):
                action = None
            if not isinstance(action, dict):
                return Step("error: an action is a JSON object")
        result = self.client.step(action)
        return Step(self._text(result.observation), result.reward, bool(result.done))

    def close(self) -> None:
        self.client.close()

    def _text(self, observation: Any) -> str:
        if not self.observation_field:
            return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, dict) or self.observation_field not in observation:
            raise KeyError(f"the observation has no field {self.observation_field}: {str(observation)[:200]}")
        return str(observation[self.observation_field])
