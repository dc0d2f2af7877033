"""GPUs of this machine's servers: each server takes its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from megarl.knobs import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"

log = logging.getLogger(__name__)


def offered_gpus(count: int) -> list[str]:
    """The GPUs that this process may use, by number or UUID: CUDA_VISIBLE_DEVICES, else `count` of them from 0."""
    return os.environ[VISIBLE].split(",") if os.environ.get(VISIBLE) else [str(i) for i in range(count)]


def visible_gpus(tp_size: int, index: int, first: int, offered: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES of the machine's server number `index`: its `tp_size` GPUs, then the others.

    SGLang uses the first `tp_size`. The others are only read, by reshard.transport=cuda_ipc. Servers are counted from
    GPU `first` of those `offered`.

    Raises:
        UserError: the machine offers too few.
    """
    start = first + index * tp_size
    own = list(offered[start : start + tp_size])
    if len(own) < tp_size:
        raise UserError(
            f"server {index} of this machine needs GPUs {start} to {start + tp_size - 1}, and {len(offered)} are "
            f"offered ({VISIBLE}={os.environ.get(VISIBLE, '')}); give the run more GPUs, or lower server.n_servers"
        )
    return ",".join([*own, *(gpu for gpu in offered if gpu not in own)])


def number_gpus() -> None:
    """Names this process's GPUs by number where CUDA_VISIBLE_DEVICES has UUIDs, after CUDA has read them.

    SGLang's custom all-reduce takes numbers alone, and a server goes on without it. CUDA reads the variable once, so
    GPUs stay the same. Slices of GPUs, and a machine with GPUs that this user cannot ask for their UUIDs, keep theirs.
    """
    if not os.environ.get(VISIBLE, "").startswith("GPU-"):
        return
    import torch

    if not torch.cuda.is_available():
        return
    torch.cuda.init()
    try:
        numbers = [str(torch.cuda._get_nvml_device_index(gpu)) for gpu in range(torch.cuda.device_count())]
    except (RuntimeError, OSError) as error:
        log.warning("%s=%s has no numbers for SGLang's custom all-reduce: %s", VISIBLE, os.environ[VISIBLE], error)
        return
    os.environ |= {VISIBLE: ",".join(numbers), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the driver's order


def check_gpu_count(gpus: int, ranks: int, servers: int, tp_size: int, colocate: bool, teacher: int = 0) -> None:
    """Refuses a machine with fewer GPUs than its ranks, its servers and the servers of its teacher need.

    Raises:
        UserError: naming both numbers and the knobs.
    """
    apart, shared = ranks + servers * tp_size + teacher, max(ranks, servers * tp_size)
    needed = shared if colocate else apart
    if needed <= gpus:
        return
    remedy = "lower parallel.*, server.n_servers or teacher.*" if teacher else "lower parallel.* or server.n_servers"
    if not colocate and not teacher and servers and shared <= gpus:
        remedy += ", or share the GPUs in turn by server.colocate=true"
    held = f"{servers} servers x server.tp_size={tp_size}" + f" and {teacher} GPUs of the teacher" * bool(teacher)
    raise UserError(
        f"{ranks} trainer ranks {'beside' if not colocate else 'in turn with'} {held} need {needed} GPUs, and this "
        f"machine has {gpus}; {remedy}"
    )
