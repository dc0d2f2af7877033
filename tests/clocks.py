"""Clocks that tests put forward: a limit passes by an event, however late a busy machine is."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from typing import Any


def put_forward(loop: AbstractEventLoop, seconds: float) -> None:
    """Puts the clock of an asyncio loop forward: what has waited there for so long is out of time. From any thread."""
    clocked: Any = loop
    if not hasattr(loop, "ahead"):
        clocked.ahead, clocked.own_time = 0.0, loop.time
        clocked.time = lambda: clocked.own_time() + clocked.ahead
    clocked.ahead += seconds
    loop.call_soon_threadsafe(lambda: None)  # it looks at its timers now
