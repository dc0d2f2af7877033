"""Environments of the tests, hostile ones among them; they run in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from megarl.environments.base import Environment, Step


class Count(Environment):
    """Says numbers from the row's `from` on; the episode is done when the answer is the row's `answer`.

    The row's `fault` makes it fail in `step`, and its `close` in `close`, which writes to the file `mark`. A step that
    hangs makes the file `begun` first.
    """

    row: dict[str, Any] = {}  # noqa: RUF012

    def reset(self, row: dict[str, Any]) -> str:
        self.row, self.number = row, row.get("from", 0)
        if row.get("fault") == "raise in reset":
            raise ValueError("two\nlines")
        if "lost" in row and not Path(row["lost"]).exists():
            Path(row["lost"]).touch()
            raise ValueError("the first is lost")
        if row.get("fault") == "long reset":
            return "x" * 300
        if row.get("fault") == "no text":
            return 7  # type: ignore[return-value]
        return f"It is {self.number}."

    def step(self, answer: str) -> Step:
        self.number += 1
        fault = self.row.get("fault")
        if fault == "hang":
            if "begun" in self.row:
                Path(self.row["begun"]).touch()
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
        if fault == "fork":
            os.fork()
        if fault == "print":
            print("garbage", flush=True)
            os.write(1, b"\xff\x00" * 1000)
        if fault == "connection":
            for descriptor in range(3, 100):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"garbage, and more of it")
        if fault == "number on the connection":
            for descriptor in range(3, 100):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"\0\0\0\0\0\0\0\x017")
        if fault == "child":
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path(self.row["pid"]).write_text(str(child.pid))
            raise ValueError("a child is left")
        if fault == "bytes":
            return Step(b"x")  # type: ignore[arg-type]
        if fault == "no JSON":
            return Step([{"role": "user", "content": object()}])  # type: ignore[dict-item]
        if fault == "surrogate":
            return Step("\ud800")
        if fault == "more keys":
            return Step([{"role": "user", "content": "x", "tool_calls": "x"}])
        reward = {"nan": float("nan"), "text": "1", "none": None, "huge": 3e38, "complex": 1j}.get(str(fault), 0.25)
        done = "no" if fault == "done" else answer == self.row.get("answer")
        text: Any = "x" * int(self.row.get("size", 0)) or f"It is {self.number}."
        if "role" in self.row:
            text = [{"role": self.row["role"], "content": text}]
        return Step(text, reward, done)  # type: ignore[arg-type]

    def end(self) -> float | None:
        return self.row.get("end")

    def close(self) -> None:
        if self.row.get("close") == "hang":
            time.sleep(10_000)
        if self.row.get("close") == "raise":
            raise OSError("two\nlines\x9b31m")
        if "mark" in self.row:
            with open(self.row["mark"], "a") as file:
                file.write("closed\n")


class Unclosable(Count):
    """Cannot be closed."""

    row = {"close": "raise"}  # noqa: RUF012


class Tooled(Count):
    """Has a tool."""

    tools = [{"type": "function", "function": {"name": "ring", "description": "Rings.", "parameters": {}}}]  # noqa: RUF012


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
