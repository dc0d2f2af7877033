"""Full tensors in buckets over a real gloo group, and the digests that prove their arrival."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from megarl.knobs import UserError
from megarl.ops.digest import digest
from megarl.reshard.config import ReshardConfig
from megarl.reshard.plan.holdings import Box
from megarl.reshard.transfer.digests import VerificationError, check_digests, check_names
from megarl.reshard.transfer.full_tensor_transfer import (
    ABANDONED,
    DeliveryError,
    FullTensorSender,
    header_key,
    receive_full,
)
from megarl.reshard.transfer.store import Deadline, join_store, open_store, read, write
from megarl.reshard.transfer.transports.gloo import GlooTransport

HOST = "127.0.0.1"


class Link:
    """Both ends of a group of two: the sender's, and the receiver's for a thread of the same test."""

    address = "the far end"

    def __init__(self, store: TCPStore):
        self.store = PrefixStore("pair", store)
        self.far_store = PrefixStore("pair", join_store(HOST, store.port, 120))
        far: list[GlooTransport] = []
        thread = threading.Thread(target=lambda: far.append(GlooTransport(self.far_store, HOST, 1, 2, 120)))
        thread.start()
        self.broadcast_group = GlooTransport(self.store, HOST, 0, 2, 120)
        thread.join(300)
        self.far_group = far[0]
        self.headers: list[Any] = []
        self.loads: list[list[str]] = []  # names of each call of the model's loader

    def announce(self, header: Any) -> None:
        write(self.store, header_key(1, len(self.headers)), header)
        self.headers.append(header)

    def watch(self) -> None:
        """Does nothing: the receiver is a thread."""

    def explain(self, error: Exception) -> Exception:
        return error


class ShortOfTime(Deadline):
    """Leaves minutes for the first wait, and half a second for each later one, whenever it begins."""

    waits = 0

    def left(self) -> float:
        self.waits += 1
        return super().left() if self.waits == 1 else 0.5


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link(open_store(HOST, 300))
    yield link
    link.broadcast_group.abort()
    link.far_group.abort()


def transfer(
    link: Link, tensors: dict[str, Tensor], bucket_bytes: int, dtype: torch.dtype, folder: Path | None = None
) -> tuple[FullTensorSender, dict]:
    received: dict[str, Tensor] = {}
    failures: list[Exception] = []

    def load(named: list[tuple[str, Tensor]]) -> None:
        received.update({name: tensor.clone() for name, tensor in named})
        link.loads.append([name for name, _ in named])

    def far_end() -> None:
        try:
            receive_full(link.far_store, None if folder else link.far_group, 1, Deadline(120), load)
        except (RuntimeError, TimeoutError) as error:
            failures.append(error)

    thread = threading.Thread(target=far_end)
    thread.start()
    sender = FullTensorSender(
        targets=[link],
        bucket_bytes=bucket_bytes,
        deadline=Deadline(120),
        dtypes=dict.fromkeys(tensors, dtype),
        boxes={name: [Box(name, (0,) * t.dim(), tuple(t.shape))] for name, t in tensors.items()},
        folder=folder,
    )
    for name, tensor in tensors.items():
        sender.add(name, tensor)
    sender.finish()
    thread.join(300)
    assert failures == []
    return sender, received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 500, 10_000])
def test_whole_tensors_arrive_bit_for_bit_in_buckets_of_bounded_size(
    link: Link, bucket_bytes: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 5), "b": (3,), "c": (40, 10), "d": (1,), "e": (5, 7)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["e"] = tensors["e"].T  # not contiguous
    sender, received = transfer(link, tensors, bucket_bytes, dtype)
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(received[name], tensor.to(dtype))
        (box,) = (box for box in sender.digests if box.name == name)
        assert sender.digests[box] == digest(received[name])
    buckets = link.headers[:-1]
    for header in buckets:
        assert header["bytes"] <= bucket_bytes or len(header["tensors"]) == 1
    assert sender.nbytes == sum(header["bytes"] for header in buckets)
    if bucket_bytes == 10_000:
        assert len(buckets) == 1


def test_whole_tensors_arrive_bit_for_bit_in_files(link: Link, tmp_path: Path) -> None:
    tensors = {name: torch.randn(shape) for name, shape in {"a": (7, 5), "b": (3,), "c": (40, 10)}.items()}
    sender, received = transfer(link, tensors, 500, torch.bfloat16, tmp_path / "weights")
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(received[name], tensor.bfloat16())
    files = sorted((tmp_path / "weights").iterdir())
    assert [file.name for file in files] == ["model-00000.safetensors", "model-00001.safetensors"]
    assert [header["file"] for header in link.headers[:-1]] == [str(file) for file in files]
    assert sender.nbytes == sum(header["bytes"] for header in link.headers[:-1]) >= 2 * (35 + 3 + 400)


def test_an_abandoned_push_ends_the_receiver_at_once(link: Link) -> None:
    link.announce(ABANDONED)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="gave this push up"):
        receive_full(link.far_store, link.far_group, 1, Deadline(600), print)
    assert time.monotonic() - start < 300


def test_a_receiver_that_hears_nothing_ends_by_its_deadline(link: Link) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(1/header/0 did not come within|deadline of) 0\.3 s"):
        receive_full(link.far_store, link.far_group, 1, Deadline(0.3), print)
    assert time.monotonic() - start < 300


def test_a_bucket_that_never_comes_ends_by_its_deadline(link: Link) -> None:
    link.announce({"bytes": 64, "tensors": [("a", "float32", [16])]})
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="bucket 0 of 64 bytes did not arrive"):
        receive_full(link.far_store, link.far_group, 1, ShortOfTime(300), print)
    assert time.monotonic() - start < 300


def test_a_sender_whose_peer_left_ends_by_its_deadline(link: Link) -> None:
    link.far_group.abort()
    sender = FullTensorSender([link], 100, Deadline(2), {"a": torch.float32}, {})
    start = time.monotonic()
    with pytest.raises(DeliveryError) as error:
        sender.add("a", torch.zeros(1000))  # larger than a bucket: sent at once
    assert error.value.server == "the far end"
    assert time.monotonic() - start < 300


def test_the_store_listens_on_the_loopback_address_alone() -> None:
    store = open_store(HOST, 300)
    listening = [c for c in psutil.Process().net_connections("tcp") if c.laddr and c.laddr.port == store.port]
    assert {c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN} == {HOST}
    with socket.create_connection((HOST, store.port), timeout=900):
        pass


def test_a_value_that_is_not_json_is_an_error_and_not_unpickled() -> None:
    store = open_store(HOST, 300)
    store.set("key", b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match="Expecting value"):
        read(store, "key", Deadline(300))


def test_digests_tell_bytes_dtypes_and_shapes_apart() -> None:
    base = torch.arange(12, dtype=torch.float32)
    flipped = base.clone()
    flipped.view(torch.uint8)[17] ^= 1
    others = [flipped, base.view(3, 4), base.view(torch.int32), base.flip(0), base[:11]]
    assert len({digest(tensor) for tensor in [base, *others]}) == 1 + len(others)
    assert digest(base) == digest(torch.arange(24, dtype=torch.float32)[::2] / 2)


def test_names_that_were_not_sent_or_are_not_held_are_listed() -> None:
    check_names(["a", "b"], ["b", "a"])
    with pytest.raises(VerificationError, match="nothing was sent for b, c, d and 1 more") as error:
        check_names(["a"], ["a", "b", "c", "d", "e"])
    assert error.value.tensor == "b"
    with pytest.raises(VerificationError, match="z was sent, and the server holds no such weight"):
        check_names(["a", "z"], ["a"])


def test_a_digest_that_differs_or_was_never_sent_names_its_tensor() -> None:
    one, two = Box("a", (0,), (4,)), Box("b", (0,), (4,))
    assert check_digests({one: "x", two: "y"}, {one: "x"}, "rank 0") == 1
    with pytest.raises(VerificationError, match="rank 3 does not hold what was sent of b") as error:
        check_digests({one: "x", two: "y"}, {one: "x", two: "z"}, "rank 3")
    assert error.value.tensor == "b"
    with pytest.raises(VerificationError, match="of b"):
        check_digests({one: "x"}, {one: "x", two: "y"}, "rank 0")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"pause_mode": "stop"}, r"reshard\.pause_mode=stop must be one of retract, in_place, abort"),
        ({"verify": "sometimes"}, "must be one of always, sampled, off"),
        ({"path": "some"}, "must be one of exact, full"),
        ({"transport": "tcp"}, "must be one of auto, gloo, shm, nccl, cuda_ipc, nixl, mooncake, disk"),
        ({"on_failure": "hope"}, "must be one of stop, drop_server"),
        ({"bucket_bytes": -16}, "bucket_bytes=-16 must be at least 0"),
        ({"bucket_bytes": 100}, "bucket_bytes=100 must be a multiple of 16"),
        ({"anchor_every": 0}, "anchor_every=0 must be at least 1"),
        ({"transfer_deadline_s": 0.0}, r"transfer_deadline_s=0\.0 must be above 0"),
        ({"max_logprob_diff": -1.0}, "max_logprob_diff=-1.0 must be at least 0"),
        ({"path": "full", "transport": "shm"}, r"with reshard\.path=full use gloo or disk"),
        ({"path": "full", "delta": True}, r"delta=true needs reshard\.path=exact"),
        ({"transport": "disk"}, r"needs reshard\.folder"),
    ],
)
def test_a_wrong_knob_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ReshardConfig(**knobs)


@pytest.mark.parametrize("by_files", [False, True])
def test_projections_that_sglang_joins_come_in_one_call(link: Link, by_files: bool, tmp_path: Path) -> None:
    """DeepSeek-V3's q_b_proj is larger than a bucket and lies between them. The last layer has no q_a_proj."""
    names = [f"0.{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")]
    tensors = {name: torch.full((64, 4), float(i)) for i, name in enumerate([*names, "1.kv_a_proj_with_mqa.weight"])}
    _, received = transfer(link, tensors, 1100, torch.float32, tmp_path if by_files else None)
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
    assert sorted(name for names in link.loads for name in names) == sorted(tensors)
    (joined,) = [names for names in link.loads if "0.q_a_proj.weight" in names]
    assert "0.kv_a_proj_with_mqa.weight" in joined
    assert len(link.headers) == len(tensors) + 1, "each in a bucket of its own, and the end"
