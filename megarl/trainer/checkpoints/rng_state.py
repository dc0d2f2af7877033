"""The random generators of a rank, as JSON: torch's (host and GPU), numpy's and Python's."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from megarl.parallel import platform


def state() -> dict[str, Any]:
    """Snapshot of this process's generators."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    snapshot = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(words), next_gauss],
    }
    if platform.has_gpu():
        snapshot["device"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return snapshot


def restore(snapshot: dict[str, Any]) -> None:
    """Sets the generators to a snapshot of `state`."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(snapshot["torch"])), dtype=torch.uint8))
    kind, keys, position, has_gauss, gauss = snapshot["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, words, next_gauss = snapshot["python"]
    random.setstate((version, tuple(words), next_gauss))
    if platform.has_gpu() and "device" in snapshot:
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(snapshot["device"])), dtype=torch.uint8))


def derive(snapshot: dict[str, Any], rank: int) -> None:
    """Seeds the generators of a new rank from another rank's state, alike at every resume."""
    digest = hashlib.sha256(f"{snapshot['torch']}:{rank}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.manual_seed(seed)  # seeds GPUs too
    np.random.seed(seed % 2**32)
    random.seed(seed)
