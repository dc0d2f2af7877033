"""GPUs of this machine's servers: each server sees its own alone."""

from __future__ import annotations

from megarl.knobs import UserError


def visible_gpus(tp_size: int, index: int, first: int, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of the machine's server number `index`: its `tp_size` GPUs, counted from `first`.

    `visible` is the machine's own CUDA_VISIBLE_DEVICES: numbers or UUIDs.

    Raises:
        UserError: the machine offers too few.
    """
    start = first + index * tp_size
    if not visible:
        return ",".join(str(i) for i in range(start, start + tp_size))
    offered = visible.split(",")
    if start + tp_size > len(offered):
        raise UserError(
            f"server {index} of this machine needs GPUs {start} to {start + tp_size - 1}, of which "
            f"CUDA_VISIBLE_DEVICES={visible} offers {len(offered)}; give the run more GPUs, or lower server.n_servers"
        )
    return ",".join(offered[start : start + tp_size])


def check_gpu_count(gpus: int, ranks: int, servers: int, tp_size: int, colocate: bool) -> None:
    """Refuses a machine with fewer GPUs than its ranks and servers need.

    Raises:
        UserError: naming both numbers and the knobs.
    """
    apart, shared = ranks + servers * tp_size, max(ranks, servers * tp_size)
    needed = shared if colocate else apart
    if needed <= gpus:
        return
    remedy = "lower parallel.* or server.n_servers"
    if not colocate and servers and shared <= gpus:
        remedy += ", or share the GPUs in turn by server.colocate=true"
    held = f"{servers} servers x server.tp_size={tp_size}"
    raise UserError(
        f"{ranks} trainer ranks {'beside' if not colocate else 'in turn with'} {held} need {needed} GPUs, and this "
        f"machine has {gpus}; {remedy}"
    )
