"""Reward functions that fail in every way. The module imports fast, as every pool imports it."""

from __future__ import annotations

import asyncio
import os
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
    elif what == "memory":
        bytearray(64 * 2**30)
    elif what == "nan":
        return float("nan")
    elif what == "text":
        return "1.0"  # type: ignore[return-value]
    elif what == "none":
        return None  # type: ignore[return-value]
    return 2.0 * i


async def halve(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], i: int, **_: Any
) -> float:
    await asyncio.sleep(0)
    return i / 2
