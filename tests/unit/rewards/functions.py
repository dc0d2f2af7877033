"""Reward functions that fail in every way. The module imports fast, as every pool imports it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any


def double(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], i: int, what: str = ""
) -> float:
    if what == "hang":
        time.sleep(1000)
    elif what == "raise":
        raise ValueError(f"no {i}")
    elif what == "exit":
        os._exit(3)
    elif what == "sys.exit":
        raise SystemExit(0)
    elif what == "longer than the limit":
        time.sleep(60)
    elif what == "half a second of work":
        compute(0.5)
    elif what == "memory":
        bytearray(1152 * 2**20)
    elif what == "less memory":
        bytearray(256 * 2**20)
    elif what == "nan":
        return float("nan")
    elif what == "text":
        return "1.0"  # type: ignore[return-value]
    elif what == "none":
        return None  # type: ignore[return-value]
    return 2.0 * i


def compute(seconds: float) -> None:
    """Takes so many seconds of the processor time of this process."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def knows_math_verify(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: Any
) -> float:
    return float("math_verify" in sys.modules)


async def halve(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], i: int, **_: Any
) -> float:
    await asyncio.sleep(0)
    return i / 2
