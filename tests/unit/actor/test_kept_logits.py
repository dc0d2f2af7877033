"""Bytes of logits that are kept for backward: on the CPU as ever, on a GPU by its free memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.actor.config import EngineConfig
from megarl.actor.model import heads
from megarl.actor.model.heads import HeadSettings, KeptLogits

GIB = 2**30
CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


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


def most(megabytes: int, device: torch.device, tp_size: int = 1) -> int:
    """The largest number of bytes that is kept, which lies below 64 GiB."""
    kept, low, high = KeptLogits(megabytes, tp_size), 0, 64 * GIB
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if kept.holds(middle, device) else (low, middle - 1)
    return low


def test_the_default_is_256_mib_on_the_cpu_and_a_quarter_of_free_memory_on_a_gpu() -> None:
    default = EngineConfig().kept_logits_mb
    assert most(default, CPU) == most(default, CPU, 4) == 256 * 2**20
    assert most(default, GPU) == 6 * GIB


def test_ranks_that_share_the_vocabulary_go_by_what_is_equal_on_all() -> None:
    assert most(-1, GPU, 2) == 2 * GIB


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("megabytes", [0, 300])
def test_a_number_is_taken_on_every_device(device: torch.device, megabytes: int) -> None:
    assert most(megabytes, device, 2) == megabytes * 2**20


def test_free_memory_is_asked_for_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(20 * GIB, 64 * GIB), (4 * GIB, 64 * GIB)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: next(answers))
    kept = KeptLogits(-1, 1)
    assert [kept.holds(3 * GIB, GPU) for _ in range(3)] == [True] * 3
    kept.begin()
    assert [kept.holds(3 * GIB, GPU) for _ in range(3)] == [False] * 3


@pytest.mark.parametrize(
    ("dtype", "float32", "item"), [("float32", False, 4), ("bfloat16", False, 2), ("bfloat16", True, 4)]
)
def test_a_pass_asks_for_the_logits_of_the_tokens_with_a_label(dtype: str, float32: bool, item: int) -> None:
    asked = []

    class Kept(KeptLogits):
        def holds(self, size: int, device: torch.device) -> bool:
            asked.append(size)
            return super().holds(size, device)

    hidden = torch.randn(6, 4, dtype=getattr(torch, dtype), requires_grad=True)
    labels = heads.Labels(torch.randint(0, 10, (6,)), torch.tensor([0, 2, 3]))
    settings = HeadSettings(1.0, float32, Kept(300, 1), 0.0)
    alone: Any = SimpleNamespace(tp_rank=0, tp_size=1, tp=None)
    weight = torch.randn(10, 4, dtype=hidden.dtype)
    logprobs, _ = heads.logprobs(hidden, labels, weight, alone, 10, settings, False)
    assert asked == [3 * 10 * item]
    assert (logprobs != 0).tolist() == [True, False, True, True, False, False]
