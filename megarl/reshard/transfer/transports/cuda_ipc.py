"""CUDA IPC, for a trainer rank and a server rank on one GPU or on peer GPUs of one machine (co-located).

The receiver maps the sender's staging buffers by their IPC handle and copies device to device. Not measured.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.transfer.transports.base import PlainStaging, Staging
from megarl.reshard.transfer.transports.mapped import MappedTransport

FIELDS = 8  # of `UntypedStorage._share_cuda_`: device, handle, sizes and the event that guards the memory


class CudaIpcTransport(MappedTransport):
    """Messages in GPU memory that the receiver maps by its IPC handle."""

    @classmethod
    def make_staging(cls, bucket_bytes: int) -> Staging:
        return PlainStaging(bucket_bytes, torch.device("cuda", torch.cuda.current_device()))

    def describe(self) -> Any:
        """One list per slot: bytes fields of the handle as base64, other fields unchanged. No pickle is involved."""
        return [
            [
                {"bytes": b64encode(v).decode()} if isinstance(v, bytes) else v
                for v in s.untyped_storage()._share_cuda_()
            ]
            for s in self.staging.slots
        ]

    def map(self, described: Any) -> list[Tensor]:
        slots = []
        for fields in described:
            if len(fields) != FIELDS:
                raise ValueError(f"an IPC handle has {FIELDS} fields, not {len(fields)}: update trainer and server")
            values = [b64decode(v["bytes"]) if isinstance(v, dict) else v for v in fields]
            # The handle holds the sender's device index; both sides of this transport see the same GPUs.
            storage = torch.UntypedStorage._new_shared_cuda(*values)
            slots.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return slots

    def settle(self) -> None:
        """Waits for the device: a slot is offered once packed and acknowledged once read, and copies are async."""
        torch.cuda.synchronize()
