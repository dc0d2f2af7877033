"""The random generators of a rank, as JSON: torch's (host and GPU), numpy's and Python's."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from megarl.parallel import platform


def state() -> dict[str, Any]:
    """Where this process's generators stand."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    found = {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(words), next_gauss],
    }
    if platform.has_gpu():
        found["device"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return found


def restore(found: dict[str, Any]) -> None:
    """Sets the generators to a `state`."""
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(found["torch"])), dtype=torch.uint8))
    kind, keys, position, has_gauss, gauss = found["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, words, next_gauss = found["python"]
    random.setstate((version, tuple(words), next_gauss))
    if platform.has_gpu() and "device" in found:
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(found["device"])), dtype=torch.uint8))


def derive(found: dict[str, Any], rank: int) -> None:
    """Seeds the generators of a rank that had none, from another rank's state: the same again at every resume."""
    digest = hashlib.sha256(f"{found['torch']}:{rank}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.manual_seed(seed)  # a GPU's too
    np.random.seed(seed % 2**32)
    random.seed(seed)
