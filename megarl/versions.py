"""Installed package versions, GPUs and driver of this machine, found without importing any package.

Used by `megarl.preflight` and `doctor`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
from dataclasses import dataclass

# Packages that a run depends on, by display name: the distributions that provide it. The first installed one counts.
PACKAGES = {
    "torch": ("torch",),
    "Megatron-core": ("megatron-core",),
    "SGLang": ("sglang",),
    "Transformer Engine": ("transformer-engine",),
    "flash-attn": ("flash-attn",),
    "apex": ("apex",),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "transformers": ("transformers",),
    "Ray": ("ray",),
}
QUERY_S = 10.0  # deadline of nvidia-smi


def version_of(package: str) -> str | None:
    """Returns the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Maps each name of `PACKAGES` to its installed version, or to None."""
    return {
        name: next((version for package in packages if (version := version_of(package))), None)
        for name, packages in PACKAGES.items()
    }


@dataclass(frozen=True)
class GPUs:
    """GPUs of this machine as the driver reports them: names, memory in MiB, and the driver's version."""

    names: tuple[str, ...] = ()
    memory_mib: tuple[int, ...] = ()
    driver: str | None = None


def gpus() -> GPUs:
    """Queries nvidia-smi. Returns an empty `GPUs` if it is missing, fails or lists no GPU."""
    if shutil.which("nvidia-smi") is None:
        return GPUs()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):  # a driver that does not answer counts as absent
        return GPUs()
    rows = [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    return GPUs(
        tuple(name for name, _, _ in rows),
        tuple(int(memory) for _, memory, _ in rows),
        rows[0][2] if rows else None,
    )


def driver_cuda(library: str = "libcuda.so.1") -> tuple[int, int] | None:
    """Newest CUDA version that the NVIDIA driver runs, as (major, minor); None without a driver.

    Asks the driver's library, so that a container's forward-compatible one counts. Makes no CUDA context.
    """
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # no such library, or one without this function
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)
