"""Digests of the weights that were sent, compared with digests of the weights that a server holds.

`megarl/ops/digest.py` computes them where the tensors are. XXH3-128 runs at memory speed (about 10 GB/s on one core,
ten times SHA-256), so that hashing never dominates a sync. Its 128 bits leave no room for an accidental match. It
guards against faults, not against forgers: somebody who could forge a digest here could write the weights as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.reshard.plan.holdings import Box
from megarl.reshard.plan.transfer_plan import NO_RELAY, TransferPlan

SAMPLED = 8  # with verify=sampled each sync reads back one bucket in 8, another eighth each time


@dataclass(frozen=True)
class BucketSample:
    """The buckets that are read back and compared: indices that leave `remainder` modulo `modulus`; 0: none."""

    modulus: int
    remainder: int = 0

    @staticmethod
    def of(verify: str, attempt_number: int) -> BucketSample:
        """By the knob `verify` and the number of the attempt: `sampled` reads back everything in SAMPLED attempts."""
        return {
            "always": BucketSample(1),
            "sampled": BucketSample(SAMPLED, attempt_number % SAMPLED),
            "off": BucketSample(0),
        }[verify]

    def takes(self, bucket: int) -> bool:
        return self.modulus > 0 and bucket % self.modulus == self.remainder


class VerificationError(RuntimeError):
    """A server holds other weights than were sent. `tensor` names the first checkpoint tensor at fault.

    `messages` are the plan's messages whose bits differ, if the weights came by messages.
    """

    def __init__(self, message: str, tensor: str, messages: Collection[int] = ()):
        super().__init__(message)
        self.tensor = tensor
        self.messages = frozenset(messages)


def check_names(sent: Iterable[str], held: Iterable[str]) -> None:
    """Raises VerificationError unless the server holds every tensor sent, and was sent every tensor it holds."""
    sent, held = set(sent), set(held)
    if untouched := sorted(held - sent):
        raise VerificationError(f"nothing was sent for {_listing(untouched)}, which the server holds", untouched[0])
    if unknown := sorted(sent - held):
        raise VerificationError(f"{_listing(unknown)} was sent, and the server holds no such weight", unknown[0])


def check_digests(sent: Mapping[Box, str], held: Mapping[Box, str], where: str) -> int:
    """Returns the number of boxes compared. Raises VerificationError naming the tensors whose digests differ."""
    if wrong := sorted({box.name for box, value in held.items() if sent.get(box) != value}):
        raise VerificationError(f"{where} does not hold what was sent of {_listing(wrong)}", wrong[0])
    return len(held)


def check_messages(
    plan: TransferPlan,
    sample: BucketSample,
    sent: Sequence[Mapping[int, Sequence[str]]],
    destination: int,
    held: Mapping[int, Sequence[str]],
    where: str,
) -> int:
    """Compares a destination rank's weights with the sent ones, for every sampled message of the plan.

    `sent` has the digests of each source rank's buckets, `held` the digests of the destination's messages. Returns the
    number of tensor parts compared. Raises VerificationError naming the tensors that differ.
    """
    compared, wrong, wrong_messages = 0, set(), []
    for index in np.flatnonzero(plan.messages.destination == destination).tolist():
        bucket, source = int(plan.messages.bucket[index]), int(plan.messages.source[index])
        if not sample.takes(bucket):
            continue
        rows = plan.ops.row[plan.buckets.first[bucket] : plan.buckets.first[bucket + 1]]
        names = [plan.destinations.names[i] for i in plan.destinations.tensor[rows]]
        sent_digests, held_digests = sent[source].get(bucket, ()), held.get(index, ())
        if len(sent_digests) != len(names) or len(held_digests) != len(names):
            differ = names
        else:
            differ = [name for name, a, b in zip(names, sent_digests, held_digests, strict=True) if a != b]
            compared += len(names)
        if differ:
            wrong.update(differ)
            wrong_messages.append(index)
    if wrong:
        text = f"{where} does not hold what was sent of {_listing(sorted(wrong))}"
        raise VerificationError(text, min(wrong), wrong_messages)
    return compared


def relays_at_fault(plan: TransferPlan, wrong: Collection[int]) -> set[int]:
    """Destination ranks that corrupted the messages `wrong`; empty if no relay sent one of them.

    Follows a bucket's way to the first rank with a wrong copy. The relay that sent the copy is at fault; without one,
    the rank itself.
    """
    messages = plan.messages
    if not any(messages.relay[index] != NO_RELAY for index in wrong):
        return set()
    at_fault: set[int] = set()
    for index in wrong:
        relay = int(messages.relay[index])
        own_copy = np.flatnonzero((messages.bucket == messages.bucket[index]) & (messages.destination == relay))
        if relay == NO_RELAY:
            at_fault.add(int(messages.destination[index]))
        elif int(own_copy[0]) not in wrong:
            at_fault.add(relay)
    return at_fault


def _listing(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
