"""Weights by Mooncake's engine: every bit arrives, damage is noticed, and peers that leave or hang are named.

Each case runs on a stand-in, and on the real package over TCP where it is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from megarl import cli
from megarl.knobs import UserError
from megarl.reshard.transfer.shard_transfer import TransferError
from megarl.reshard.transfer.store import Deadline
from megarl.reshard.transfer.transports import mooncake as transport
from tests.unit.reshard.mapped_cases import HeldDeadline, check_damage, check_departure, check_random_layout
from tests.unit.reshard.test_shard_transfer import ALL, Group, make_world


class TransferEngine:
    """Mooncake's engine as the transport calls it, for ranks that are threads of one process.

    Covers the calls, their order and registered ranges. Does not cover networks and GPU memory.
    """

    engines: ClassVar[dict[str, TransferEngine]] = {}
    ports: ClassVar[Iterator[int]] = itertools.count(16000)
    status = 0  # of reads and starts
    hangs: ClassVar[threading.Event | None] = None  # reads end once it is set

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        assert (metadata, protocol, devices) == ("P2PHANDSHAKE", "tcp", "")
        self.port = next(self.ports)  # ranks start at once
        self.engines[f"{host}:{self.port}"] = self
        return self.status

    def get_rpc_port(self) -> int:
        return self.port

    def register_memory(self, address: int, nbytes: int) -> int:
        self.ranges[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        del self.ranges[address]
        return 0

    def transfer_sync_read(self, name: str, to: int, from_: int, nbytes: int) -> int:
        for address, owner in ((to, self), (from_, self.engines[name])):
            assert nbytes <= owner.ranges[address], "not registered"
        if self.hangs is not None:
            self.hangs.wait()
        elif not self.status:
            ctypes.memmove(to, from_, nbytes)
        return self.status


def install_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("mooncake.engine")
    vars(stand_in).update(TransferEngine=TransferEngine)
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", stand_in)
    monkeypatch.setattr(TransferEngine, "engines", {})
    monkeypatch.setattr(transport, "RDMA_DEVICES", transport.Path("/nowhere"))


@pytest.fixture(params=["stand-in", "real"])
def mooncake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "real":
        pytest.importorskip("mooncake.engine", reason="pip install mooncake-transfer-engine", exc_type=ImportError)
        yield
        return
    install_stand_in(monkeypatch)
    yield
    assert all(engine.ranges == {} for engine in TransferEngine.engines.values()), "memory stays registered"


@pytest.mark.parametrize(("seed", "sources", "destinations"), [(1, 1, 2), (3, 2, 4)])
def test_random_layouts_arrive_bit_for_bit(seed: int, sources: int, destinations: int, mooncake: None) -> None:
    check_random_layout("mooncake", seed, sources, destinations, torch.bfloat16)


def test_a_byte_damaged_on_the_way_is_noticed(mooncake: None) -> None:
    check_damage("mooncake")


def test_a_receiver_that_leaves_is_named(mooncake: None) -> None:
    check_departure("mooncake")


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_a_read_that_hangs_or_fails_names_the_trainer_rank(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake: a read whose peer hangs or is lost, for which the real engine takes 30 s or another process."""
    install_stand_in(monkeypatch)
    group = Group(make_world(1, 1, 1, torch.float32), "mooncake")
    ended = threading.Event()
    monkeypatch.setattr(TransferEngine, "hangs", ended if fault == "hangs" else None)
    monkeypatch.setattr(TransferEngine, "status", -1)
    message = "deadline of 1 s passed" if fault == "hangs" else r"trainer rank 0 left \(Mooncake could not read"
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(group.senders[0].send, HeldDeadline(failed := threading.Event()), ALL, {})
        with pytest.raises(TransferError, match=message) as error:
            group.receivers[0].receive(Deadline(1 if fault == "hangs" else 300), {})
        assert error.value.peer == "trainer rank 0"
        failed.set()
        assert isinstance(sending.exception(), TransferError)
    ended.set()
    group.close()


def test_an_engine_that_does_not_start_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(monkeypatch)
    monkeypatch.setattr(TransferEngine, "status", -1)
    staging = transport.MooncakeTransport.make_staging(4096)
    assert isinstance(staging, transport.EngineStaging)
    with pytest.raises(RuntimeError, match=r"did not start at 127\.0\.0\.1 by tcp \(-1\); use nccl or gloo"):
        staging.start("127.0.0.1")


def test_without_the_package_a_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake: a machine without the package."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mooncake" else find(name))
    with pytest.raises(UserError) as error:
        cli.load(["+experiment=gsm8k_grpo", "reshard.transport=mooncake"])
    assert str(error.value) == (
        "reshard.transport=mooncake needs the package mooncake-transfer-engine on trainer and servers: pip install "
        "mooncake-transfer-engine, or use auto"
    )
