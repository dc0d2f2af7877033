"""Weights over NIXL: every bit arrives, damage is noticed, and peers that leave or hang are named.

Each case runs on a stand-in, and on the real package over TCP where it is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megarl import cli
from megarl.knobs import UserError
from megarl.reshard.transfer.shard_transfer import TransferError
from megarl.reshard.transfer.store import Deadline
from tests.unit.reshard.mapped_cases import HeldDeadline, check_damage, check_departure, check_random_layout
from tests.unit.reshard.test_shard_transfer import ALL, Group, make_world


class Agent:
    """NIXL's agent as the transport calls it, for ranks that are threads of one process.

    A read copies on its second poll. Covers the calls, their order and registered ranges. Does not cover UCX, RDMA, GPU
    memory and NIXL's own metadata format.
    """

    ranges: ClassVar[dict[str, list[tuple[int, int]]]] = {}  # of every agent
    outcome = "DONE"

    def __init__(self, name: str, config: Any):
        self.name, self.backends, self.known = name, dict.fromkeys(config, 1), set[str]()

    def register_memory(self, tensors: list[Tensor]) -> str:
        self.ranges[self.name] = [(t.data_ptr(), t.data_ptr() + t.numel()) for t in tensors]
        return self.name

    def deregister_memory(self, registered: str) -> None:
        del self.ranges[registered]

    def get_agent_metadata(self) -> bytes:
        return json.dumps(self.name).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.known.add(json.loads(metadata))
        return str(json.loads(metadata)).encode()

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, parts: list[Any], memory: str | None = None) -> tuple[int, int]:
        (part,) = parts
        assert isinstance(part, Tensor) or memory in ("DRAM", "VRAM")
        return (part.data_ptr(), part.numel()) if isinstance(part, Tensor) else part[:2]

    def initialize_xfer(self, operation: str, local: tuple[int, int], remote: tuple[int, int], name: str) -> list[Any]:
        assert operation == "READ"
        assert name in self.known
        for (address, nbytes), owner in ((local, self.name), (remote, name)):
            assert any(a <= address and address + nbytes <= b for a, b in self.ranges[owner]), "not registered"
        assert local[1] == remote[1]
        return [local, remote]

    def transfer(self, read: list[Any]) -> str:
        return "PROC"

    def check_xfer_state(self, read: list[Any]) -> str:
        (to, nbytes), (from_, _) = read
        if self.outcome == "DONE":
            ctypes.memmove(to, from_, nbytes)
        return self.outcome


def install_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("nixl._api")
    vars(stand_in).update(nixl_agent=Agent, nixl_agent_config=lambda backends: backends)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", stand_in)
    monkeypatch.setattr(Agent, "ranges", {})


@pytest.fixture(params=["stand-in", "real"])
def nixl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "real":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
        pytest.importorskip("nixl", reason="pip install nixl")
        yield
        return
    install_stand_in(monkeypatch)
    yield
    assert Agent.ranges == {}, "memory stays registered"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seed", "sources", "destinations"), [(1, 1, 2), (2, 4, 2), (3, 2, 4)])
def test_random_layouts_arrive_bit_for_bit(
    seed: int, sources: int, destinations: int, dtype: torch.dtype, nixl: None
) -> None:
    check_random_layout("nixl", seed, sources, destinations, dtype)


def test_a_byte_damaged_on_the_way_is_noticed(nixl: None) -> None:
    check_damage("nixl")


def test_a_receiver_that_leaves_is_named(nixl: None) -> None:
    check_departure("nixl")


@pytest.mark.parametrize(
    ("outcome", "message"), [("PROC", "deadline of 1 s passed"), ("ERR", "trainer rank 0 left .NIXL could not read")]
)
def test_a_read_that_hangs_or_fails_names_the_trainer_rank(
    outcome: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake: the states of a read whose peer hangs or is lost, which the real package would need a dead peer for."""
    install_stand_in(monkeypatch)
    monkeypatch.setattr(Agent, "outcome", outcome)
    group = Group(make_world(1, 1, 1, torch.float32), "nixl")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(group.senders[0].send, HeldDeadline(failed := threading.Event()), ALL, {})
        with pytest.raises(TransferError, match=message) as error:
            group.receivers[0].receive(Deadline(1 if "deadline" in message else 300), {})
        assert error.value.peer == "trainer rank 0"
        failed.set()
        assert isinstance(sending.exception(), TransferError)
    group.close()


def test_a_sender_that_is_silent_ends_the_receiver_by_its_deadline(nixl: None) -> None:
    group = Group(make_world(1, 1, 1, torch.float32), "nixl")
    with pytest.raises(TransferError, match=r"waited for trainer rank 0: deadline of 0\.5 s passed"):
        group.receivers[0].receive(Deadline(0.5), {})
    group.close()


def test_without_the_package_a_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake: a machine without the package."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nixl" else find(name))
    with pytest.raises(UserError) as error:
        cli.load(["+experiment=gsm8k_grpo", "reshard.transport=nixl"])
    assert str(error.value) == (
        "reshard.transport=nixl needs the package nixl on trainer and servers: pip install nixl, or use auto"
    )
