"""Cases of transports whose ranks read each other's memory: every bit arrives, damage and departures are named."""

from __future__ import annotations

import threading

import pytest
import torch

from megarl.reshard.transfer.digests import VerificationError, check_messages
from megarl.reshard.transfer.shard_transfer import TransferError
from megarl.reshard.transfer.store import Deadline
from tests.unit.reshard.test_shard_transfer import ALL, Group, damage_one_message, make_world, send_new_weights


def check_random_layout(name: str, seed: int, sources: int, destinations: int, dtype: torch.dtype) -> None:
    """Two syncs of random weights arrive bit for bit by the transport `name`."""
    world = make_world(seed, sources, destinations, dtype)
    group = Group(world, name)
    for _ in range(2):  # the group serves the next sync too
        sent, received = send_new_weights(world, group)
        assert sum(report.nbytes for report in sent) == sum(received)
        digests = [report.digests for report in sent]
        for rank, receiver in enumerate(group.receivers):
            assert check_messages(world.plan, ALL, digests, rank, receiver.read_back(ALL), "here") > 0
    group.close()


def check_damage(name: str) -> None:
    """A byte damaged on the way is noticed."""
    world = make_world(3, 2, 2, torch.float32)
    group = Group(world, name)
    damage_one_message(group.ends[2])
    sent, _ = group.run()
    digests = [report.digests for report in sent]
    with pytest.raises(VerificationError, match="rank 0 does not hold what was sent of t"):
        check_messages(world.plan, ALL, digests, 0, group.receivers[0].read_back(ALL), "rank 0")
    group.close()


class HeldDeadline(Deadline):
    """Comes soon after the event. A rank that is about to wait is held until then; what it has sent arrives."""

    def __init__(self, event: threading.Event):
        super().__init__(600)
        self._event = event

    def left(self) -> float:
        assert self._event.wait(300)
        return 0.5


def check_departure(name: str) -> None:
    """A receiver that leaves is named."""
    group = Group(make_world(1, 1, 2, torch.float32), name)
    group.ends[1].abort()
    with pytest.raises(TransferError, match="rank 0 of server 0 left"):
        group.senders[0].send(Deadline(300), ALL, {})
    group.close()
