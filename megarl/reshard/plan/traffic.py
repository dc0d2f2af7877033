"""Traffic of a plan as JSON values, for a run's folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.reshard.plan.box_arrays import sum_by
from megarl.reshard.plan.transfer_plan import NO_RELAY, TransferPlan

MAX_PAIRS = 4096  # listed, the heaviest first


def traffic(plan: TransferPlan) -> dict[str, Any]:
    """Bytes that each rank sends and receives, and each pair of ranks exchanges.

    `sent` is per trainer rank and `received` per server rank, in bytes. A pair is `[trainer rank, server rank, bytes]`,
    by the rank whose copy it is; `relayed` counts the bytes that another server rank sends on.
    """
    messages, ranks = plan.messages, len(plan.topology.node)
    nbytes = plan.buckets.nbytes[messages.bucket]
    pairs, index = np.unique(messages.source * ranks + messages.destination, return_inverse=True)
    moved = sum_by(index, nbytes, len(pairs))
    heaviest = np.argsort(-moved, kind="stable")[:MAX_PAIRS]
    return {
        "hash": plan.hash,
        "tensors": len(plan.sources.names),
        "buckets": len(plan.buckets.nbytes),
        "bucket_bytes": plan.bucket_bytes,
        "messages": len(messages.bucket),
        "relayed": int(nbytes[messages.relay != NO_RELAY].sum()),
        "sent": plan.bytes_out.tolist(),
        "received": plan.bytes_in.tolist(),
        "held": plan.bytes_needed.tolist(),
        "server_of_rank": plan.topology.server.tolist(),
        "all_pairs": len(pairs),
        "pairs": [[int(pairs[i] // ranks), int(pairs[i] % ranks), int(moved[i])] for i in sorted(heaviest)],
    }
