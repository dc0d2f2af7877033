"""Bytes of logits that are kept for backward: on the CPU as ever, on a GPU by its free memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.actor.config import EngineConfig
from megarl.actor.model.heads import kept_logits_bytes

GIB = 2**30
CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


def alone(tp_size: int = 1) -> Any:
    return SimpleNamespace(tp_size=tp_size)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 64 GiB: 20 free, and 4 of torch's 30 unused. Stands for a device; nothing is allocated on it."""
    answers = {
        "mem_get_info": lambda device: (20 * GIB, 64 * GIB),
        "memory_reserved": lambda device: 30 * GIB,
        "memory_allocated": lambda device: 26 * GIB,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=64 * GIB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def test_the_default_is_256_mib_on_the_cpu_and_a_quarter_of_free_memory_on_a_gpu() -> None:
    default = EngineConfig().kept_logits_mb
    assert kept_logits_bytes(default, CPU, alone()) == kept_logits_bytes(default, CPU, alone(4)) == 256 * 2**20
    assert kept_logits_bytes(default, GPU, alone()) == 6 * GIB


def test_ranks_that_share_the_vocabulary_go_by_what_is_equal_on_all() -> None:
    assert kept_logits_bytes(-1, GPU, alone(2)) == 2 * GIB


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("megabytes", [0, 300])
def test_a_number_is_taken_on_every_device(device: torch.device, megabytes: int) -> None:
    assert kept_logits_bytes(megabytes, device, alone(2)) == megabytes * 2**20
