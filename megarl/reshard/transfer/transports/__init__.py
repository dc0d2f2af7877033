"""Transports: ways for bytes to get from a trainer rank to a server rank, one file each."""

from __future__ import annotations

from collections.abc import Collection

from megarl.reshard.transfer.transports.base import Transport

MESSAGE_TRANSPORTS = ("gloo", "shm", "nccl", "cuda_ipc", "nixl", "mooncake")


def largest_bucket(names: Collection[str]) -> int:
    """Bytes of a bucket that suits all these transports: the largest that one of them asks for."""
    return max(transport_named(name).bucket_bytes for name in names)


def transport_named(name: str) -> type[Transport]:
    """The class of a message transport, imported on demand, so that a run loads only its own."""
    if name == "gloo":
        from megarl.reshard.transfer.transports.gloo import GlooTransport

        return GlooTransport
    if name == "shm":
        from megarl.reshard.transfer.transports.shm import ShmTransport

        return ShmTransport
    if name == "nccl":
        from megarl.reshard.transfer.transports.nccl import NcclTransport

        return NcclTransport
    if name == "cuda_ipc":
        from megarl.reshard.transfer.transports.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport
    if name == "nixl":
        from megarl.reshard.transfer.transports.nixl import NixlTransport

        return NixlTransport
    if name == "mooncake":
        from megarl.reshard.transfer.transports.mooncake import MooncakeTransport

        return MooncakeTransport
    raise ValueError(f"transport {name!r} is not one of {', '.join(MESSAGE_TRANSPORTS)}")
