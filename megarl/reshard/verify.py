"""Digests of what was sent against digests of what a server holds.

XXH3-128: it runs at memory speed (about 10 GB/s on one core, ten times SHA-256), so that hashing never dominates a
sync, and 128 bits leave no room for an accidental match. It guards against faults, not against forgers: whoever
could forge a digest here could write the weights as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor

from megarl.reshard.layout import Box


class VerificationError(RuntimeError):
    """What a server holds is not what was sent. `tensor` names the first checkpoint tensor at fault."""

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


def digest(tensor: Tensor) -> str:
    """Hex XXH3-128 of a tensor's dtype, shape and bytes in row-major order."""
    state = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def check_names(sent: Iterable[str], held: Iterable[str]) -> None:
    """Raises VerificationError unless the server holds every tensor sent, and was sent every tensor it holds."""
    sent, held = set(sent), set(held)
    if untouched := sorted(held - sent):
        raise VerificationError(f"nothing was sent for {_listing(untouched)}, which the server holds", untouched[0])
    if unknown := sorted(sent - held):
        raise VerificationError(f"{_listing(unknown)} was sent, and the server holds no such weight", unknown[0])


def check_digests(sent: Mapping[Box, str], held: Mapping[Box, str], where: str) -> int:
    """Returns how many boxes were compared. Raises VerificationError naming the tensors whose digests differ."""
    if wrong := sorted({box.name for box, value in held.items() if sent.get(box) != value}):
        raise VerificationError(f"{where} does not hold what was sent of {_listing(wrong)}", wrong[0])
    return len(held)


def _listing(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
