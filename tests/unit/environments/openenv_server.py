"""An OpenEnv server: guess the number that the seed is; the argument is the port."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number = seed or 0
        return Hint(hint="Guess.", done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        guess = int(action.guess)
        right = guess == self.number
        hint = "right" if right else "more" if guess < self.number else "less"
        return Hint(hint=hint, reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State()


uvicorn.run(create_fastapi_app(Guessing, Guess, Hint), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
