"""Digests of what was sent against digests of what a server holds.

XXH3-128: it runs at memory speed (about 10 GB/s on one core, ten times SHA-256), so that hashing never dominates a
sync, and 128 bits leave no room for an accidental match. It guards against faults, not against forgers: whoever
could forge a digest here could write the weights as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from megarl.reshard.plan.holdings import Box
from megarl.reshard.plan.transfer_plan import TransferPlan

SAMPLED = 8  # one bucket in so many is read back with verify=sampled, others at each sync


@dataclass(frozen=True)
class Sample:
    """Which buckets are read back and compared: those whose index leaves `remainder` by `modulus`; 0: none."""

    modulus: int
    remainder: int = 0

    @staticmethod
    def of(verify: str, sequence: int) -> Sample:
        """By the knob `verify` and the number of the sync: `sampled` has read back everything after SAMPLED syncs."""
        return {"always": Sample(1), "sampled": Sample(SAMPLED, sequence % SAMPLED), "off": Sample(0)}[verify]

    def takes(self, bucket: int) -> bool:
        return self.modulus > 0 and bucket % self.modulus == self.remainder


class VerificationError(RuntimeError):
    """What a server holds is not what was sent. `tensor` names the first checkpoint tensor at fault."""

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


class LogprobMismatchError(RuntimeError):
    """What the servers sample does not follow from the weights that they were sent."""


def check_first_logprobs(difference: float, bound: float, version: int, servers: Sequence[str]) -> None:
    """Raises LogprobMismatchError where `difference`, the mean |trainer - rollout log-prob| of the first tokens sampled
    under `version`, exceeds `bound` or is not a number."""
    if not difference <= bound:
        raise LogprobMismatchError(
            f"the first tokens of version {version} from {', '.join(servers) or 'the servers'} have log-probs that "
            f"differ from the trainer's by {difference:.3g} on average, above reshard.max_logprob_diff={bound:g}: the "
            "servers do not compute what the trainer does; compare dtypes and SGLang's arguments, or raise the bound"
        )


def check_equal_logprobs(trainer: Tensor, rollout: Tensor) -> None:
    """Raises LogprobMismatchError unless both, of the same tokens under the same weights, are equal in every bit."""
    if different := int((trainer != rollout).sum()):
        largest = float((trainer - rollout).abs().max())
        raise LogprobMismatchError(
            f"deterministic=true, but {different} of {trainer.numel()} log-probs differ between rollout and trainer, "
            f"by up to {largest:.3g}: this machine's matrix products, or arguments under sglang, depend on the batch; "
            "leave out such arguments, or set it to false"
        )


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


def check_messages(
    plan: TransferPlan,
    sample: Sample,
    sent: Sequence[Mapping[int, Sequence[str]]],
    destination: int,
    held: Mapping[int, Sequence[str]],
    where: str,
) -> int:
    """Compares what a destination rank holds with what was sent to it, for every sampled message of the plan.

    `sent` has the digests of each source rank's buckets, `held` those of the destination's messages. Returns how many
    pieces of tensors were compared. Raises VerificationError naming the tensors that differ.
    """
    compared, wrong = 0, set()
    for index in np.flatnonzero(plan.messages.destination == destination).tolist():
        bucket, source = int(plan.messages.bucket[index]), int(plan.messages.source[index])
        if not sample.takes(bucket):
            continue
        rows = plan.ops.row[plan.buckets.first[bucket] : plan.buckets.first[bucket + 1]]
        names = [plan.destinations.names[i] for i in plan.destinations.tensor[rows]]
        given, found = sent[source].get(bucket, ()), held.get(index, ())
        if len(given) != len(names) or len(found) != len(names):
            wrong.update(names)
            continue
        wrong.update(name for name, a, b in zip(names, given, found, strict=True) if a != b)
        compared += len(names)
    if wrong:
        raise VerificationError(f"{where} does not hold what was sent of {_listing(sorted(wrong))}", min(wrong))
    return compared


def _listing(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
