"""Weight transfers on the device: a trainer rank and a server rank, with live parameters there, by every transport."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work
from watch import ON_HOST, WATCH, Watch

from megarl.reshard.plan.holdings import Box, Fragment, Holdings, Topology
from megarl.reshard.plan.planner import plan
from megarl.reshard.transfer.digests import BucketSample, VerificationError, check_messages
from megarl.reshard.transfer.full_tensor_transfer import FullTensorSender
from megarl.reshard.transfer.shard_transfer import Route, ShardReceiver, ShardSender
from megarl.reshard.transfer.store import Deadline, join_store, open_store
from megarl.reshard.transfer.transports import disk, transport_named
from tests.unit.reshard import test_mooncake, test_nixl
from tests.unit.reshard.memory_cases import check
from tests.unit.reshard.test_shard_transfer import damage_one_message

HOST = "127.0.0.1"
SHAPES = {"embedding": (48, 16), "norm": (16,), "weight": (24, 16)}
BUCKET_BYTES = 512


class _Done:
    """A message of NCCL: here it is over once it has been waited for."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self._work.wait()


class NcclOverGloo:
    """`ProcessGroupNCCL` for tensors of the device, as far as the transport uses it; gloo carries the bytes."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        self._group = ProcessGroupGloo(store, rank, size, options._timeout)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Done:
        return _Done(self._group.send([self._on_host(x) for x in tensors], peer, tag))  # type: ignore[attr-defined]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Done:
        return _Done(self._group.recv([self._on_host(x) for x in tensors], peer, tag))  # type: ignore[attr-defined]

    def abort(self) -> None:
        self._group.abort()

    def _on_host(self, tensor: Tensor) -> Tensor:
        assert tensor.is_cuda, "NCCL sends and receives in memory of the device"
        return ON_HOST(tensor)


def share_memory_of_one_process() -> None:
    """Answers for CUDA's IPC handles: both ranks are threads here, and a handle is a number in a table."""
    shared: dict[bytes, torch.UntypedStorage] = {}

    def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        assert storage.device.type == "cuda", "an IPC handle is of memory of the device"
        handle = str(len(shared)).encode()
        shared[handle] = storage
        return (0, handle, storage.nbytes(), 0, b"", 0, b"", False)

    torch.UntypedStorage._share_cuda_ = share  # type: ignore[method-assign]
    torch.UntypedStorage._new_shared_cuda = lambda device, handle, *_: shared[handle]  # type: ignore[method-assign]


def fragments(values: dict[str, Tensor]) -> list[Fragment]:
    """The whole tensors as one rank's fragments."""
    return [Fragment(0, k, Box(k, (0,) * v.dim(), tuple(v.shape)), v) for k, v in values.items()]


def holdings(parts: list[Fragment]) -> Holdings:
    """The fragments as one rank of a side."""
    return Holdings.of([[(f.box, str(f.view.dtype).removeprefix("torch.")) for f in parts]])


def exact(transport: str) -> dict[str, Any]:
    """Three syncs from float32 to bfloat16: two in full, one as a delta. Proven by digests and by values.

    A fourth, with a bit of one message flipped, is noticed.
    """
    torch.distributed.ProcessGroupNCCL = NcclOverGloo  # type: ignore[attr-defined]
    share_memory_of_one_process()
    trained = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
    served = {n: torch.zeros(s[::-1], device="cuda", dtype=torch.bfloat16).t() for n, s in SHAPES.items() if len(s) > 1}
    served["norm"] = torch.zeros(SHAPES["norm"], device="cuda", dtype=torch.bfloat16)
    sources, destinations = fragments(trained), fragments(served)
    one = np.zeros(1, dtype=np.int64)
    transfer_plan = plan(holdings(sources), holdings(destinations), Topology(one, one, one), BUCKET_BYTES)
    transport_class: Any = transport_named(transport)
    store = open_store(HOST, 60)

    pinned: list[bool] = []  # of each staging buffer: this device's pinned memory does not tell that it is
    empty = torch.empty

    def recorded(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*size, pin_memory=pin_memory, **options)

    def join(rank: int) -> Any:
        make = transport_class.make_receiver_staging if rank == 1 else transport_class.make_staging
        staging = make(BUCKET_BYTES)
        private = PrefixStore("group", join_store(HOST, store.port, 60))
        return transport_class(private, HOST, rank, 2, 60, staging)

    with ThreadPoolExecutor(2) as pool:
        with patch.object(torch, "empty", recorded):
            ends = list(pool.map(join, (0, 1)))
        if transport == "gloo":
            assert pinned == [True] * 4, "CUDA copies pageable memory through a buffer of its own"
        to, back = Route("rank 0 of server 0", ends[0], 1), Route("trainer rank 0", ends[1], 0)
        sender = ShardSender(transfer_plan, 0, sources, {0: to}, ends[0].staging, keep=True)
        receiver = ShardReceiver(transfer_plan, 0, destinations, {0: back}, ends[1].staging)

        def watched(call: Any) -> tuple[Any, int]:
            with Watch() as watch:
                return call(), sum(count for (_, kind), count in watch.waits.items() if kind != "synchronize")

        reads = []
        for sync, sample in enumerate((BucketSample(1), BucketSample(0), BucketSample(1))):
            for value in trained.values():
                value[:4] += 1 + sync
            counts = sender.counts() if sync == 2 else {}
            assert (len(counts) > 0) == (sync == 2), "the third sync changes few elements"
            sending = pool.submit(watched, lambda: sender.send(Deadline(120), sample, counts))  # noqa: B023
            receiving = pool.submit(watched, lambda: receiver.receive(Deadline(120), counts))  # noqa: B023
            (received, of_receiver), (sent, of_sender) = receiving.result(), sending.result()
            held = receiver.read_back(sample)
            compared = check_messages(transfer_plan, sample, [sent.digests], 0, held, "rank 0")
            assert received.nbytes == sent.nbytes
            assert (compared > 0) == (sample.modulus > 0)
            for name, value in served.items():
                assert torch.equal(value, trained[name].to(torch.bfloat16)), name
            reads.append([of_sender, of_receiver])
        hashed = {bucket: views.hashed(ends[0].staging.slots[0]) for bucket, views in sender.views.items()}
        places = [parts._places.nbytes for parts, _ in hashed.values() if parts._places is not None]
        live = sum(places) + 2 * sum(leaves.nbytes for _, leaves in hashed.values() if leaves.is_cuda)  # and joined
        damage_one_message(ends[1])
        sending = pool.submit(sender.send, Deadline(300), sample, {})
        receiver.receive(Deadline(300), {})
        with pytest.raises(VerificationError, match="rank 0 does not hold what was sent of"):
            check_messages(transfer_plan, sample, [sending.result().digests], 0, receiver.read_back(sample), "rank 0")
    return {"messages": len(sender.messages), "parts": len(transfer_plan.ops.row), "reads": reads, "digests": live}


def memory(transport: str, relay: str, keep: bool) -> dict[str, list[int]]:
    """Ranks of weight syncs hold what `sync_memory` says. Returns its bytes of the trainer and of both servers."""
    torch.distributed.ProcessGroupNCCL = NcclOverGloo  # type: ignore[attr-defined]
    share_memory_of_one_process()
    with pytest.MonkeyPatch.context() as patched:
        test_nixl.install_stand_in(patched)
        test_mooncake.install_stand_in(patched)
        told = check(transport, "cuda", relay=relay, keep=keep)
    return {"gpu": [rank.gpu for rank in told], "host": [rank.host for rank in told]}


def full(folder: str) -> dict[str, Any]:
    """Full tensors of the device as files, with a digest of each."""
    trained = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
    boxes = {fragment.box.name: [fragment.box] for fragment in fragments(trained)}
    dtypes = dict.fromkeys(SHAPES, torch.bfloat16)
    sender = FullTensorSender([], BUCKET_BYTES, Deadline(60), dtypes, boxes, Path(folder))
    _, waits = WATCH.counted(lambda: [sender.add(name, value) for name, value in trained.items()])
    sender.finish()
    read = dict(item for path in sorted(Path(folder).glob("*.safetensors")) for item in disk.read(str(path)))
    for name, value in trained.items():
        assert torch.equal(read[name], value.to("cpu", torch.bfloat16)), name
    return {"digests": len(sender.digests), "waits": waits}
