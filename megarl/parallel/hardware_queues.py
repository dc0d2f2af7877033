"""CUDA's hardware queues of a trainer rank: CUDA_DEVICE_MAX_CONNECTIONS, before CUDA starts. Imports no torch.

With one queue, kernels start in the order of their calls. Before Blackwell, Megatron relies on this under tensor and
context parallelism: a collective called before a product must take its multiprocessors first (layers.py:621 of
Megatron 0.19, and arguments.py:1413 of its training). Elsewhere the driver's eight queues stay, because one queue
holds up the streams of experts, gradients and servers. With `reshard.overlap_scoring` they stay too: a message of the
push that waits for its peer would hold up a collective of scoring. The peer's own message waits for that collective.

Servers never inherit the variable (`rollout/servers/inherited_environment.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os

from megarl.parallel.config import ParallelConfig

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10  # first major compute capability whose scheduling needs no order of calls
NVML = "libnvidia-ml.so.1"  # comes with the driver

log = logging.getLogger(__name__)
_entered = False


def wanted(layout: ParallelConfig, major: int | None, pushes_beside_scoring: bool = False) -> str | None:
    """Value for ranks of this layout on GPUs of this major compute capability; None: the driver's default."""
    ordered = (layout.tp_size > 1 or layout.cp_size > 1) and not pushes_beside_scoring
    return "1" if ordered and major is not None and major < BLACKWELL else None


def enter(layout: ParallelConfig, pushes_beside_scoring: bool = False) -> None:
    """Sets the variable in this trainer rank. A value of the user's own is kept, and said where it is another.

    CUDA reads it once: call this before anything that asks for a GPU. So the first call of a process decides.
    """
    global _entered
    if _entered:
        return
    _entered = True
    value, given = wanted(layout, lowest_major(), pushes_beside_scoring), os.environ.get(VARIABLE)
    if given is None and value is not None:
        os.environ[VARIABLE] = value
    elif given is not None and given != value and os.environ.get("RANK", "0") == "0":
        log.warning(
            "%s=%s of the environment is kept; for parallel.tp_size=%d and cp_size=%d on these GPUs megarl would %s",
            *(VARIABLE, given, layout.tp_size, layout.cp_size),
            "leave it unset" if value is None else f"set {value}",
        )


def lowest_major() -> int | None:
    """Lowest major compute capability of this machine's GPUs, without starting CUDA; None without a driver or GPU."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        count, majors = ctypes.c_uint(), []
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                continue  # not this user's, or lost: the checks of GPUs name it
            if not nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
                majors.append(major.value)
        return min(majors, default=None)
    finally:
        nvml.nvmlShutdown()
