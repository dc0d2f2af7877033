"""What is installed here, without importing any of it: versions, GPUs, driver. For `megarl.preflight` and `doctor`."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from dataclasses import dataclass

# What a run stands on, by the names that people know: the distributions that bring it, the first that is there counts.
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
QUERY_S = 10.0


def version_of(package: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """By name, the version of each of `PACKAGES`; None: not found."""
    return {
        name: next((found for package in packages if (found := version_of(package))), None)
        for name, packages in PACKAGES.items()
    }


@dataclass(frozen=True)
class GPUs:
    """The GPUs of this machine as its driver tells: their names, their memory in MiB, and the driver's version."""

    names: tuple[str, ...] = ()
    memory_mib: tuple[int, ...] = ()
    driver: str | None = None


def gpus() -> GPUs:
    """What nvidia-smi says; none where it is not there or finds none."""
    if shutil.which("nvidia-smi") is None:
        return GPUs()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (subprocess.SubprocessError, OSError):  # a driver that does not answer is one that is not there
        return GPUs()
    rows = [[part.strip() for part in line.split(",")] for line in said.splitlines() if line.count(",") == 2]
    return GPUs(
        tuple(name for name, _, _ in rows),
        tuple(int(memory) for _, memory, _ in rows),
        rows[0][2] if rows else None,
    )
