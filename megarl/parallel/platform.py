"""Devices of this machine: GPU or CPU, Transformer Engine, and the backend of collectives."""

from __future__ import annotations

import importlib.util
import os

import torch


def has_gpu() -> bool:
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """True if Transformer Engine's layers can run: its package and a GPU are present."""
    return has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def device() -> torch.device:
    """Device of this rank: its GPU by `LOCAL_RANK`, or the CPU."""
    if has_gpu():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def collective_backend() -> str:
    """Name of the torch.distributed backend for the device: nccl or gloo."""
    return "nccl" if has_gpu() else "gloo"
