"""An OpenEnv server on a port of this machine, its argument: find the number from 1 to 9 that the seed hides."""

import re
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str


class HigherLower(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 1

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number = (seed or 0) % 9 + 1
        return Hint(hint="Guess 1-9.", done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        numbers = re.findall(r"\d+", action.guess)
        if not numbers:
            return Hint(hint="no number", reward=-0.5, done=False)
        guess = int(numbers[-1][-9:])
        if guess == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if guess < self.number else "lower", reward=-0.1, done=False)

    @property
    def state(self) -> State:
        return State()


uvicorn.run(create_fastapi_app(HigherLower, Guess, Hint), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
