"""CUDA IPC between processes that number GPUs differently, with IPC handles and device properties mocked.

The mock covers torch.cuda's devices of each side and the fields of a handle. It maps no memory.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megarl.parallel import platform
from megarl.reshard.transfer.transports.base import PlainStaging
from megarl.reshard.transfer.transports.cuda_ipc import FIELDS, CudaIpcTransport


def see(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """From now on this process sees these GPUs, in this order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))


class Slot:
    """A staging buffer on the sender's GPU number 1, as far as `describe` looks at it."""

    device = torch.device("cuda", 1)

    def untyped_storage(self) -> Slot:
        return self

    def _share_cuda_(self) -> tuple[Any, ...]:
        return 1, b"handle", 64, 0, b"counter", 0, b"event", True


@pytest.fixture
def transport() -> CudaIpcTransport:
    return CudaIpcTransport(HashStore(), "127.0.0.1", 0, 1, 60.0, PlainStaging(16))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The handles that torch is asked to open."""
    handles: list[tuple[Any, ...]] = []

    def open_handle(*fields: Any) -> torch.UntypedStorage:
        handles.append(fields)
        return torch.UntypedStorage(64)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_handle)
    return handles


def described_by_a_sender_that_sees(
    transport: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch, *uuids: str
) -> dict[str, Any]:
    see(monkeypatch, *uuids)
    transport.staging.slots = [Slot(), Slot()]  # type: ignore[list-item]
    return json.loads(json.dumps(transport.describe()))


def test_a_handle_is_opened_on_the_gpu_of_the_sender_by_the_receivers_number(
    transport: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch, opened: list[tuple[Any, ...]]
) -> None:
    described = described_by_a_sender_that_sees(transport, monkeypatch, "GPU-a", "GPU-b")
    see(monkeypatch, "GPU-c", "GPU-d", "GPU-b")
    assert [slot.numel() for slot in transport.map(described)] == [64, 64]
    assert opened == [(2, b"handle", 64, 0, b"counter", 0, b"event", True)] * 2
    assert len(opened[0]) == FIELDS


def test_a_gpu_that_this_process_does_not_see_is_named(
    transport: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch, opened: list[tuple[Any, ...]]
) -> None:
    described = described_by_a_sender_that_sees(transport, monkeypatch, "GPU-a", "GPU-b")
    see(monkeypatch, "GPU-a", "GPU-c")
    with pytest.raises(ValueError, match=r"memory is on GPU-b, and this process sees GPU-a, GPU-c: .*; add it, or use"):
        transport.map(described)
    assert opened == []


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("max_split_size_mb:64, expandable_segments: True", "max_split_size_mb:64, expandable_segments: False"),
        ("expandable_segments:False", None),
        ("", None),
    ],
)
def test_slots_lie_in_memory_that_other_processes_may_map(
    settings: str, whole: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles of expandable segments are passed on by pidfd_getfd, which containers refuse. Other settings stay."""
    calls: list[str] = []
    empty = torch.empty

    def allocated(*size: Any, **keys: Any) -> torch.Tensor:
        calls.append("slot")
        return empty(*size)

    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    CudaIpcTransport.make_staging(16)
    assert calls == (["slot", "slot"] if whole is None else [whole, "slot", "slot", settings])


def test_a_slot_waits_for_its_own_streams_copies_alone(
    transport: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push beside scoring would otherwise wait for the scores, with the servers paused."""
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("stream"))
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("device"))
    transport.settle()
    assert waits == ["stream"]
