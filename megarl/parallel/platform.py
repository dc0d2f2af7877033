"""Devices of this machine, as three questions: a tensor's device, Megatron's patches, and the options of GPUs.

A GPU answers all three alike. Tests answer the third alone: they run the branches that GPUs take on the CPU.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from megarl.knobs import UserError


def has_gpu() -> bool:
    """True if this rank's tensors lie on a GPU."""
    return torch.cuda.is_available()


def needs_cpu_patches() -> bool:
    """True if Megatron's calls of `torch.cuda` must be redirected to the CPU (`megatron_patches.py`)."""
    return not has_gpu()


def takes_gpu_options() -> bool:
    """True if models, pipelines and servers are set up as on GPUs."""
    return has_gpu()


def has_transformer_engine() -> bool:
    """True if Transformer Engine's layers can run: its package is present, and options of GPUs are taken."""
    return takes_gpu_options() and importlib.util.find_spec("transformer_engine") is not None


def has_deep_ep() -> bool:
    """True if DeepEP's kernels may run: its package is present, and options of GPUs are taken."""
    return takes_gpu_options() and importlib.util.find_spec("deep_ep") is not None


def has_flash_attention() -> bool:
    """True if Transformer Engine may choose flash-attn's kernels: the package is present."""
    return importlib.util.find_spec("flash_attn") is not None


def compute_capability() -> tuple[int, int] | None:
    """Lowest compute capability of the GPUs that this process sees; None without one."""
    count = torch.cuda.device_count() if has_gpu() else 0
    return min((torch.cuda.get_device_capability(i) for i in range(count)), default=None)


def cuda_version() -> tuple[int, int] | None:
    """CUDA version that torch was built for; None of a build without it."""
    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def device() -> torch.device:
    """Device of this rank: its GPU by `LOCAL_RANK`, or the CPU.

    A rank that sees one GPU has that one: Slurm may give each task its own.

    Raises:
        UserError: the machine has no GPU of this number.
    """
    if not has_gpu():
        return torch.device("cpu")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpus > 1 and local_rank >= gpus:
        raise UserError(
            f"LOCAL_RANK={local_rank} needs GPU {local_rank}, and this machine shows {gpus}; start fewer ranks on it"
        )
    return torch.device("cuda", local_rank if gpus > 1 else 0)


def gpu_uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees, by its own numbering; [] without a GPU."""
    count = torch.cuda.device_count() if has_gpu() else 0
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]


def collective_backend() -> str:
    """Name of the torch.distributed backend for the device: nccl or gloo."""
    return "nccl" if has_gpu() else "gloo"
