"""Logs the GPU memory of a rank."""

from __future__ import annotations

import logging

import psutil
import torch

log = logging.getLogger(__name__)
GIB = 2**30


def log_gpu_stats(where: str) -> None:
    """Logs this process's GPU memory in GiB after stage `where`, at level info.

    The line has allocated, reserved and peak memory, and the GPU's total. Without a GPU it has the process's resident
    host memory.
    """
    if not torch.cuda.is_available():
        log.info("%s: %.2f GiB of host memory", where, psutil.Process().memory_info().rss / GIB)
        return
    device = torch.cuda.current_device()
    log.info(
        "%s: GPU %d: %.2f GiB allocated, %.2f reserved, %.2f peak, of %.2f",
        where,
        device,
        torch.cuda.memory_allocated(device) / GIB,
        torch.cuda.memory_reserved(device) / GIB,
        torch.cuda.max_memory_allocated(device) / GIB,
        torch.cuda.get_device_properties(device).total_memory / GIB,
    )
