"""Weight syncs of real trainer and server ranks as threads, and the tensors that they hold afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.plan.holdings import Box, Fragment
from megarl.reshard.sync.attempt import AttemptSpec, ServerGroup, key, write_spec
from megarl.reshard.sync.server_order import ServerOrder
from megarl.reshard.sync.server_rank import LiveWeights, ServerRank
from megarl.reshard.sync.trainer_rank import TrainerRank
from megarl.reshard.transfer.memory import SyncMemory, sync_memory
from megarl.reshard.transfer.store import Deadline, open_store, read, write, write_bulk
from tests.unit.reshard.test_shard_transfer import HOST

BUCKET_BYTES = 4096
SHAPES = {"a": (48, 64), "b": (40, 32), "c": (64,)}
SERVERS = 2
SMALL = 256  # bytes of gloo's notices and of tensors that belong to no rank
LIMIT_S = 300.0


class Shard:
    """A whole tensor of the trainer, as a `ShardView`."""

    def __init__(self, name: str, view: Tensor):
        self.name, self.view = name, view
        self.start, self.stop = (0,) * view.dim(), tuple(view.shape)


def held(mapped: Collection[int] = ()) -> dict[str, int]:
    """Bytes of all live storages, by device type, but for those of peers that are `mapped` at these addresses.

    What gloo carries for NCCL on the host is the device's own memory (`tests/fake_cuda`).
    """
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]
    storages = {(t.device.type, t.data_ptr() - t.storage_offset() * t.itemsize): t.untyped_storage() for t in tensors}
    sizes = {"cuda": 0, "cpu": 0}
    on_device = {address for device, address in storages if device == "cuda"}
    for (device, address), storage in storages.items():
        if device == "cpu" and address in on_device:
            continue
        sizes[device] += storage.nbytes() if storage.nbytes() > SMALL and address not in mapped else 0
    return sizes


def sync(transport: str, device: str, *, relay: str, keep: bool) -> tuple[dict[str, int], list[SyncMemory]]:
    """Carries out two syncs of one trainer rank with two servers of one rank, by the ranks' own code.

    Returns the bytes that they hold between syncs by device type, and `sync_memory` of each rank.
    """
    trained = {name: torch.randn(shape, device=device) for name, shape in SHAPES.items()}
    served = [{name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()} for _ in range(SERVERS)]
    before, store = held(), open_store(HOST, LIMIT_S)
    trainer = TrainerRank(store, HOST, 0)
    trainer.publish([Shard(name, value) for name, value in trained.items()])

    def server(number: int) -> ServerRank:
        order = ServerOrder.of(
            HOST, port=store.port, server=number, session=1, epoch=0, join=1, attempt_number=1,
            deadline_ms=int(1000 * LIMIT_S),
        )  # fmt: skip
        boxes = [Fragment(0, n, Box(n, (0,) * v.dim(), tuple(v.shape)), v) for n, v in served[number].items()]
        return ServerRank(order, LiveWeights(boxes), 0, 1)

    servers = [server(number) for number in range(SERVERS)]
    groups = tuple(ServerGroup(number, 0, 1, transport) for number in range(SERVERS))
    world = {
        "sources": [read(store, "source/0", Deadline(LIMIT_S))],
        "servers": [[read(rank.private_store, "layout/0", Deadline(LIMIT_S))] for rank in servers],
        "bucket_bytes": BUCKET_BYTES,
        "adapters_only": False,
        "relay": relay,
    }
    write_bulk(store, "world/w", world)
    for attempt in (1, 2):
        spec = AttemptSpec(
            "exact", 1, BUCKET_BYTES, "w", False, keep and attempt == 2, keep, 1, 0, LIMIT_S, LIMIT_S, groups
        )
        write_spec(store, attempt, spec)
        _attempt(attempt, spec, trainer, servers)
        assert all(torch.equal(value, trained[name]) for rank in served for name, value in rank.items())
        trained["a"][:1] += 1
    assert trainer.plan is not None
    forwarded = trainer.plan.bytes_forwarded.tolist()
    kept = int(trainer.plan.bytes_packed[0]) if keep else 0
    has_gpu = device == "cuda"
    told = [sync_memory(transport, BUCKET_BYTES, has_gpu=has_gpu, kept=kept)]
    told += [sync_memory(transport, BUCKET_BYTES, has_gpu=has_gpu, forwards=nbytes > 0) for nbytes in forwarded]
    slots = [slots[0] for rank in servers for slots in getattr(rank.group, "_mapped", {}).values()]
    after = held({slot.data_ptr() for slot in slots if isinstance(slot, Tensor)} if transport == "shm" else ())
    for rank in (trainer, *servers):
        rank.leave()
    return {name: after[name] - before[name] for name in after}, told


def _attempt(number: int, spec: AttemptSpec, trainer: TrainerRank, servers: list[ServerRank]) -> None:
    def send() -> None:
        trainer.prepare(spec, Deadline(LIMIT_S))
        write(trainer.store, key(number, "go"), True)
        trainer.transfer(number, spec, Deadline(LIMIT_S))

    jobs: list[Callable[[], Any]] = [send]
    jobs += [lambda rank=rank: rank.receive_weights(number, Deadline(LIMIT_S), lambda _: None) for rank in servers]
    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


def check(transport: str, device: str, *, relay: str, keep: bool) -> list[SyncMemory]:
    """Asserts that `sync_memory` says what the ranks hold. Returns its answers."""
    found, told = sync(transport, device, relay=relay, keep=keep)
    assert found == {"cuda": sum(rank.gpu for rank in told), "cpu": sum(rank.host for rank in told)}
    return told
