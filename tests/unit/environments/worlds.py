"""Environments of the tests, hostile ones among them; they run in processes of their own."""

from __future__ import annotations

import os
import time
from typing import Any

from megarl.environments.base import Environment, Step


class Count(Environment):
    """Says numbers from the row's `from` on; the episode is done when the answer is the row's `answer`.

    The row's `fault` makes it fail in `step`.
    """

    def reset(self, row: dict[str, Any]) -> str:
        self.row, self.number = row, row.get("from", 0)
        if row.get("fault") == "raise in reset":
            raise ValueError("two\nlines")
        if row.get("fault") == "no text":
            return 7  # type: ignore[return-value]
        return f"It is {self.number}."

    def step(self, answer: str) -> Step:
        self.number += 1
        fault = self.row.get("fault")
        if fault == "hang":
            time.sleep(10_000)
        if fault == "exit":
            os._exit(3)
        if fault == "memory":
            bytearray(2**40)
        if fault == "tuple":
            return ("text", 0.0, False)  # type: ignore[return-value]
        if fault == "number":
            return Step(7)  # type: ignore[arg-type]
        if fault == "role":
            return Step([{"role": "owner", "content": "x"}])
        if fault == "silent":
            return Step()
        reward = {"nan": float("nan"), "text": "1", "none": None}.get(str(fault), 0.25)
        done = answer == self.row.get("answer")
        text = "x" * int(self.row.get("size", 0)) or f"It is {self.number}."
        return Step(text, reward, done)  # type: ignore[arg-type]

    def end(self) -> float | None:
        return self.row.get("end")


class Slow(Count):
    """Takes too long to start."""

    def __init__(self) -> None:
        time.sleep(10_000)


class Broken(Count):
    """Cannot start."""

    def __init__(self) -> None:
        raise OSError("no room")


class Dying(Count):
    """Dies at the start."""

    def __init__(self) -> None:
        os._exit(1)


class Stranger:
    """No environment."""
