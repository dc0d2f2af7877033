"""Mooncake's transfer engine: the receiver reads the sender's staging memory over RDMA. Not measured.

Without an RDMA device the engine goes over TCP. Notices and acknowledgements go over gloo. The package is optional:
`pip install mooncake-transfer-engine`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import Store

from megarl.reshard.transfer.store import WATCH_S, Deadline
from megarl.reshard.transfer.transports.base import PlainStaging, Staging, own_device
from megarl.reshard.transfer.transports.mapped import MappedTransport

RDMA_DEVICES = Path("/sys/class/infiniband")
WITHOUT_SERVER = "P2PHANDSHAKE"  # engines tell each other of their memory, without a metadata server


class EngineStaging(PlainStaging):
    """Staging buffers that an engine of this rank registers, on the GPU if there is one. All its groups share them."""

    def __init__(self, bucket_bytes: int):
        from mooncake.engine import TransferEngine  # an optional package, loaded by runs that use it

        super().__init__(bucket_bytes, own_device())
        self.engine = TransferEngine()
        self.name = ""  # by which other engines reach this one; "": not started

    def start(self, host: str) -> None:
        """Starts the engine at the address `host`, unless it runs, and registers the buffers.

        Raises:
            RuntimeError: the engine refuses the address, the network or the memory.
        """
        if self.name:
            return
        protocol = "rdma" if RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()) else "tcp"
        if status := self.engine.initialize(host, WITHOUT_SERVER, protocol, ""):
            raise RuntimeError(f"Mooncake's engine did not start at {host} by {protocol} ({status}); use nccl or gloo")
        for slot in self.slots:
            if status := self.engine.register_memory(slot.data_ptr(), slot.numel()):
                raise RuntimeError(f"Mooncake did not register {slot.numel()} bytes on {slot.device} ({status})")
        self.name = f"{host}:{self.engine.get_rpc_port()}"

    def close(self) -> None:
        if self.name:
            for slot in self.slots:
                self.engine.unregister_memory(slot.data_ptr())
        super().close()


class MooncakeTransport(MappedTransport):
    """Messages that the receiver reads from the sender's registered memory, into its own."""

    in_place = False
    memory = "engine"
    on_gpu = True

    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_s: float, staging: Staging):
        assert isinstance(staging, EngineStaging), "made by make_staging"
        staging.start(host)
        self._registered = staging
        super().__init__(store, host, rank, size, timeout_s, staging)

    @classmethod
    def make_staging(cls, bucket_bytes: int) -> Staging:
        return EngineStaging(bucket_bytes)

    def describe(self) -> Any:
        """The name of this rank's engine, and the address of each slot."""
        return {"engine": self._registered.name, "addresses": [slot.data_ptr() for slot in self.staging.slots]}

    def map(self, described: Any) -> Any:
        return [(str(described["engine"]), int(address)) for address in described["addresses"]]

    def fetch(self, peer: int, remote_slot: int, slot: int, nbytes: int, deadline: Deadline) -> Tensor:
        """Reads a message into this rank's own slot.

        The engine's call blocks for up to 30 s where a peer hangs, so a thread makes it.

        Raises:
            RuntimeError: the engine lost the peer.
            TimeoutError: the deadline passed.
        """
        payload = self.staging.slots[slot][:nbytes]
        name, address = self.slots_of(peer)[remote_slot]
        status: Future[int] = Future()

        def read() -> None:
            try:
                status.set_result(self._registered.engine.transfer_sync_read(name, payload.data_ptr(), address, nbytes))
            except Exception as error:
                status.set_exception(error)

        threading.Thread(target=read, name="megarl-mooncake", daemon=True).start()
        while True:
            wait_s = min(deadline.left(), WATCH_S)
            try:
                outcome = status.result(wait_s)
                break
            except TimeoutError:
                continue
        if outcome:
            raise RuntimeError(f"Mooncake could not read {nbytes} bytes from {name} ({outcome})")
        return payload
