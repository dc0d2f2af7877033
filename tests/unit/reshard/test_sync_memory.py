"""The bytes that a rank gives to weight syncs are those that it allocates. `tests/fake_cuda` has the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.ops import digest
from megarl.reshard.transfer.memory import SyncMemory, sync_memory
from megarl.reshard.transfer.store import open_store
from megarl.reshard.transfer.transports import MESSAGE_TRANSPORTS
from tests.unit.reshard import test_mooncake, test_nixl
from tests.unit.reshard.memory_cases import BUCKET_BYTES, check
from tests.unit.reshard.test_full_tensor_transfer import HOST, Link, transfer


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for NIXL and Mooncake."""
    test_nixl.install_stand_in(monkeypatch)
    test_mooncake.install_stand_in(monkeypatch)
    yield
    assert test_nixl.Agent.ranges == {}, "memory stays registered"


@pytest.mark.parametrize("transport", ["gloo", "shm", "nixl", "mooncake"])
@pytest.mark.parametrize("keep", [False, True], ids=["whole", "delta"])
def test_ranks_hold_the_bytes_that_are_said_of_them(transport: str, keep: bool, packages: None) -> None:
    trainer, *servers = check(transport, "cpu", relay="off", keep=keep)
    assert (trainer.staging, trainer.gpu, trainer.digests) == (2 * BUCKET_BYTES, 0, 0)
    assert (trainer.copies > BUCKET_BYTES) == keep
    assert servers == [SyncMemory(2 * BUCKET_BYTES, 0, 0, on_gpu=False)] * 2


@pytest.mark.parametrize("transport", ["gloo", "nixl", "mooncake"])
def test_relays_hold_twice_as_much(transport: str, packages: None) -> None:
    _, *servers = check(transport, "cpu", relay="1", keep=False)
    assert [rank.staging for rank in servers] == [4 * BUCKET_BYTES] * 2  # in turn


def test_full_tensors_take_a_bucket_on_each_side() -> None:
    link = Link(open_store(HOST, 60))
    sender, _ = transfer(link, {f"t{i}": torch.ones(64, 16) for i in range(4)}, 10_000, torch.float32)
    for name in ("full", "disk"):
        memory = sync_memory(name, 10_000, has_gpu=True)
        assert (memory.gpu, memory.host) == (0, 10_000) == (0, sender._bucket.nbytes)
    assert 5000 < max(header["bytes"] for header in link.headers[:-1]) <= 10_000
    link.broadcast_group.abort()
    link.far_group.abort()


class Allocated(TorchDispatchMode):
    """Counts the bytes of storages that operations inside make."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage()._cdata not in given:
            self.nbytes += result.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("sizes", [[2 * 65536], [65536, 16, 3 * 65536]])
def test_digests_of_a_sync_allocate_the_bytes_that_are_said(sizes: list[int]) -> None:
    """The kernel is left out: it writes into memory that is given. Places come from pinned memory of the host."""
    offsets, buffer = [sum(sizes[:i]) for i in range(len(sizes))], torch.zeros(sum(sizes), dtype=torch.uint8)
    leaves = sum(digest.leaves_in(size) for size in sizes)
    shapes = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    with (
        patch.object(digest, "where"),
        patch.object(digest, "_C"),
        patch.object(Tensor, "is_cuda", new=True),
        patch.object(Tensor, "pin_memory", lambda self: self),
    ):
        every = [digest.Parts(offsets, shapes) for _ in range(3)]
        buckets = {number: (parts, parts.leaves(buffer)) for number, parts in enumerate(every)}
        with Allocated() as allocated:
            digest.digests_of(buckets)
    places = [parts._places.nbytes for parts, _ in buckets.values() if parts._places is not None]
    live = sum(places) + sum(hashes.nbytes for _, hashes in buckets.values()) + allocated.nbytes
    assert live == digest.buffer_bytes(3 * leaves)


@pytest.mark.parametrize("transport", MESSAGE_TRANSPORTS)
def test_buffers_of_digests_are_on_the_gpu_where_staging_is(transport: str) -> None:
    nbytes = 70 * 2**30  # of all buckets: a leaf of 64 KiB has 48 bytes
    part = nbytes // 65536 * 48
    memory = sync_memory(transport, 2**20, has_gpu=True, hashed=nbytes)
    assert memory.digests == (0 if transport in ("gloo", "shm") else part)
