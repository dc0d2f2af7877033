"""NIXL, NVIDIA's transfer library: the receiver reads the sender's staging memory over RDMA. Not measured.

NIXL drives InfiniBand, RoCE and other fabrics through UCX, past the CPUs of both sides. Without such a network UCX goes
over TCP or shared memory. Notices and acknowledgements go over gloo. The package is optional: `pip install nixl`.
"""

from __future__ import annotations

import secrets
import time
from base64 import b64decode, b64encode
from typing import Any

from torch import Tensor
from torch.distributed import Store

from megarl.reshard.transfer.store import POLL_S, Deadline
from megarl.reshard.transfer.transports.base import PlainStaging, Staging, own_device
from megarl.reshard.transfer.transports.mapped import MappedTransport

BACKEND = "UCX"


class RegisteredStaging(PlainStaging):
    """Staging buffers that NIXL may read and write, on the GPU if there is one. All groups of a rank share them."""

    def __init__(self, bucket_bytes: int):
        from nixl._api import nixl_agent, nixl_agent_config  # an optional package, loaded by runs that use it

        super().__init__(bucket_bytes, own_device())
        self.agent = nixl_agent(f"megarl-{secrets.token_hex(8)}", nixl_agent_config(backends=[BACKEND]))
        if BACKEND not in self.agent.backends:
            raise RuntimeError(
                f"the package nixl has no backend {BACKEND}: install a build with it, or use nccl or gloo"
            )
        self._registered = self.agent.register_memory(self.slots)

    def close(self) -> None:
        if self.slots:
            self.agent.deregister_memory(self._registered)
        super().close()


class NixlTransport(MappedTransport):
    """Messages that the receiver reads from the sender's registered memory, into its own."""

    in_place = False
    memory = "registered"
    on_gpu = True
    bucket_bytes = 256 * 2**20  # 5 ms at 50 GB/s: more than the 2 ms between two looks at a read

    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_s: float, staging: Staging):
        assert isinstance(staging, RegisteredStaging), "made by make_staging"
        super().__init__(store, host, rank, size, timeout_s, staging)
        self._registered = staging
        self._agents: set[str] = set()

    @classmethod
    def make_staging(cls, bucket_bytes: int) -> Staging:
        return RegisteredStaging(bucket_bytes)

    def describe(self) -> Any:
        """NIXL's own metadata of this rank (bytes, no pickle), and the address of each slot."""
        return {
            "metadata": b64encode(self._registered.agent.get_agent_metadata()).decode(),
            "addresses": [slot.data_ptr() for slot in self.staging.slots],
            "device": max(self.staging.slots[0].get_device(), 0),
            "memory": "VRAM" if self.staging.slots[0].is_cuda else "DRAM",
        }

    def map(self, described: Any) -> Any:
        """Makes the sender known to this rank's agent. Returns its slots as the arguments of a read."""
        agent = self._registered.agent.add_remote_agent(b64decode(described["metadata"]))
        name = agent.decode() if isinstance(agent, bytes) else str(agent)
        self._agents.add(name)
        device, memory = int(described["device"]), str(described["memory"])
        return [(name, int(address), device, memory) for address in described["addresses"]]

    def fetch(self, peer: int, remote_slot: int, slot: int, nbytes: int, deadline: Deadline) -> Tensor:
        """Reads a message into this rank's own slot.

        Raises:
            RuntimeError: NIXL lost the peer.
            TimeoutError: the deadline passed.
        """
        agent, payload = self._registered.agent, self.staging.slots[slot][:nbytes]
        name, address, device, memory = self.slots_of(peer)[remote_slot]
        remote = agent.get_xfer_descs([(address, nbytes, device)], memory)
        read = agent.initialize_xfer("READ", agent.get_xfer_descs([payload]), remote, name)
        state = agent.transfer(read)
        while state == "PROC":
            deadline.left()  # a handle that is dropped ends its read
            time.sleep(POLL_S)
            state = agent.check_xfer_state(read)
        if state != "DONE":
            raise RuntimeError(f"NIXL could not read {nbytes} bytes from {name}: {state}")
        return payload

    def abort(self) -> None:
        super().abort()
        while self._agents:
            self._registered.agent.remove_remote_agent(self._agents.pop())
