"""Rows for environments that need a seed in place of a problem: `type: megarl.data.episodes.to_episode`."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

PROMPT = "Play."
SEEDS = 2**31


def to_episode(cfg: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes rows of `messages` and `seed` from rows of any data set, which only tell seeds apart.

    Option `prompt`: what the policy reads before the environment's first observation.
    """
    prompt = cfg["datasets"][0]["options"].get("prompt", PROMPT)

    def transform(example: dict[str, Any]) -> dict[str, Any]:
        seed = zlib.crc32(repr(sorted(example.items())).encode()) % SEEDS
        messages = [{"role": "user", "content": prompt}]
        return {**dict.fromkeys(example), "messages": messages, "seed": seed}

    return transform
