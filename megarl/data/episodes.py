"""Rows for environments, from any data set: `type: megarl.data.episodes.to_episode`, or `.to_program`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

PROMPT = "Play."
SEEDS = 2**31
PROGRAM = " Write solve()."
RUNS = "try:\n    solve\nexcept NameError:\n    pass"  # passed by each program that runs without an error


def to_episode(cfg: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes rows of `messages` and `seed` from rows of any data set, which only tell seeds apart.

    Option `prompt`: what the policy reads before the environment's first observation. Option `tasks`: a number of
    tasks, or a list of them; the row's `task` is one by its seed.
    """
    options = cfg["datasets"][0]["options"]
    prompt, tasks = options.get("prompt", PROMPT), options.get("tasks", 0)
    choices = range(tasks) if isinstance(tasks, int) else tasks

    def transform(example: dict[str, Any]) -> dict[str, Any]:
        seed = zlib.crc32(repr(sorted(example.items())).encode()) % SEEDS
        messages = [{"role": "user", "content": prompt}]
        task = {"task": choices[seed % len(choices)]} if choices else {}
        return {**dict.fromkeys(example), "messages": messages, "seed": seed, **task}

    return transform


def to_program(_: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes rows of `messages` and `tests` from problems in GSM8K's layout: the program's `solve()` is the answer."""

    def transform(example: dict[str, Any]) -> dict[str, Any]:
        number = int(re.split(r"####", example["answer"])[-1].replace(",", ""))
        messages = [{"role": "user", "content": example["question"] + PROGRAM}]
        return {**dict.fromkeys(example), "messages": messages, "tests": [RUNS, f"assert solve() == {number}"]}

    return transform
