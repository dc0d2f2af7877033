"""Awaits several coroutines at once, and leaves none of them behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")
GRACE_S = 5.0  # for what is cancelled to clean up; what takes longer is left to itself


async def together(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all at once; returns their results in order.

    The first that fails cancels the others, and is raised once they have ended. `asyncio.gather` would let them ask
    servers on, while the prompt that they belong to is given out again. A cancellation from outside ends all alike.
    """
    tasks: list[asyncio.Future[T]] = []
    try:
        tasks.extend(asyncio.ensure_future(awaitable) for awaitable in awaitables)
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        if first := next((failure for failure in failures if failure is not None), None):
            raise first
        return [task.result() for task in tasks]
    finally:
        if unfinished := [task for task in tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished, timeout=GRACE_S)
