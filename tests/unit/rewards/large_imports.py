"""A reward function whose imports map gigabytes, as those of torch for GPUs do."""

from __future__ import annotations

import mmap
from typing import Any

MAPPED = mmap.mmap(-1, 5 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)  # address space alone


def half(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **_: Any) -> float:
    return len(bytearray(64 * 2**20)) / 2**27
