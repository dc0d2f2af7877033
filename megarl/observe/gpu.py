"""How much memory a rank's GPU holds, in one line of the log."""

from __future__ import annotations

import logging

import psutil
import torch

log = logging.getLogger(__name__)
GIB = 2**30


def log_gpu_stats(where: str) -> None:
    """Logs, at level info, the GPU memory that this process holds after `where`, in GiB: what tensors take, what torch
    keeps for them, the most so far, and the GPU's. Without a GPU, the process's own memory."""
    if not torch.cuda.is_available():
        log.info("%s: %.2f GiB of host memory", where, psutil.Process().memory_info().rss / GIB)
        return
    device = torch.cuda.current_device()
    log.info(
        "%s: GPU %d: %.2f GiB in tensors, %.2f kept, %.2f at most, of %.2f",
        where,
        device,
        torch.cuda.memory_allocated(device) / GIB,
        torch.cuda.memory_reserved(device) / GIB,
        torch.cuda.max_memory_allocated(device) / GIB,
        torch.cuda.get_device_properties(device).total_memory / GIB,
    )
