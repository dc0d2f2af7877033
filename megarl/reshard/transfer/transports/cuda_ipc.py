"""CUDA IPC, for a trainer rank and a server rank on one GPU or on peer GPUs of one machine (co-located).

The receiver maps the sender's staging buffers by their IPC handle and copies device to device. Both sides may number
GPUs differently: a GPU is named by its UUID.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megarl.parallel import platform
from megarl.reshard.transfer.transports.base import Staging
from megarl.reshard.transfer.transports.mapped import MappedTransport

FIELDS = 8  # of `UntypedStorage._share_cuda_`: device, handle, sizes and the event that guards the memory


class CudaIpcTransport(MappedTransport):
    """Messages in GPU memory that the receiver maps by its IPC handle."""

    memory = "gpu"
    on_gpu = True

    @classmethod
    def make_staging(cls, bucket_bytes: int) -> Staging:
        with _whole_segments():
            return super().make_staging(bucket_bytes)

    def describe(self) -> Any:
        """The GPU's UUID, and one list per slot: bytes fields of the handle as base64, other fields unchanged.

        No pickle is involved.
        """
        slots = self.staging.slots
        handles = [
            [
                {"bytes": b64encode(v).decode()} if isinstance(v, bytes) else v
                for v in s.untyped_storage()._share_cuda_()
            ]
            for s in slots
        ]
        return {"gpu": platform.gpu_uuids()[slots[0].device.index], "handles": handles}

    def map(self, described: Any) -> list[Tensor]:
        gpu, visible, slots = described["gpu"], platform.gpu_uuids(), []
        if gpu not in visible:
            raise ValueError(
                f"the sender's memory is on {gpu}, and this process sees {', '.join(visible) or 'no GPU'}: "
                "reshard.transport=cuda_ipc needs that GPU in CUDA_VISIBLE_DEVICES; add it, or use nccl or gloo"
            )
        for fields in described["handles"]:
            if len(fields) != FIELDS:
                raise ValueError(f"an IPC handle has {FIELDS} fields, not {len(fields)}: update trainer and server")
            values = [b64decode(v["bytes"]) if isinstance(v, dict) else v for v in fields]
            values[0] = visible.index(gpu)  # the handle has the sender's number of the GPU
            storage = torch.UntypedStorage._new_shared_cuda(*values)
            slots.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return slots


@contextmanager
def _whole_segments() -> Iterator[None]:
    """Makes torch allocate memory that any process of the user can map, inside the context.

    An expandable segment is passed on by pidfd_getfd, which asks for rights to trace the sender: containers and
    `ptrace_scope=1` refuse them.
    """
    settings = torch._C._accelerator_getAllocatorSettings() if platform.has_gpu() else ""
    whole = re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", settings)
    if whole == settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(whole)  # all of them: torch forgets what is not said again
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
