"""Memory that a rank gives to weight syncs: staging buffers by transport, copies for deltas, buffers of digests."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.ops.digest import buffer_bytes, leaves_in
from megarl.reshard.transfer.transports import transport_named
from megarl.reshard.transfer.transports.base import SLOTS


@dataclass(frozen=True)
class SyncMemory:
    """Bytes of one rank, on its GPU or on its host.

    `staging` and `copies` (of sent buckets, for deltas) stay from the first sync on. `digests` are bytes added while a
    sync runs; a third of them, the places of leaves, stays too. Digests on the host need no memory worth counting.
    """

    staging: int
    copies: int
    digests: int
    on_gpu: bool

    @property
    def held(self) -> int:
        """Bytes between syncs."""
        return self.staging + self.copies

    @property
    def gpu(self) -> int:
        """Bytes on the GPU between syncs."""
        return self.held if self.on_gpu else 0

    @property
    def host(self) -> int:
        """Bytes on the host between syncs."""
        return 0 if self.on_gpu else self.held


def sync_memory(
    transport_name: str,
    bucket_bytes: int,
    *,
    has_gpu: bool,
    forwards: bool = False,
    kept: int = 0,
    hashed: int = 0,
) -> SyncMemory:
    """Memory of a trainer rank or a server rank.

    Args:
        transport_name: a message transport, or full or disk, whose buckets are on the host.
        has_gpu: True if the rank's weights are on a GPU.
        forwards: True if it sends weights on to other servers, from staging of its own (`sync/relay_groups.py`).
        kept: bytes of the different buckets that it sends, where copies of them are kept for deltas.
        hashed: bytes of its different buckets, whose digests wait for the end of a sync. Parts are much larger than a
            leaf, so the padding of last leaves is not counted.
    """
    if transport_name in ("full", "disk"):
        return SyncMemory(bucket_bytes, 0, 0, on_gpu=False)
    transport = transport_named(transport_name)
    on_gpu = has_gpu and transport.on_gpu
    digests = buffer_bytes(leaves_in(hashed)) if on_gpu else 0
    return SyncMemory(SLOTS * bucket_bytes * (1 + forwards), kept, digests, on_gpu)
