"""What rank 0 asks of every rank for one attempt of a sync, as it lies in the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore, Store

from megarl.reshard.transfer.store import Deadline, read_bulk, write_bulk


@dataclass(frozen=True)
class ServerGroup:
    """A server that takes part: its index in the session, the epoch of its group, and how many ranks it has."""

    index: int
    epoch: int
    size: int

    def private(self, store: Store) -> PrefixStore:
        """The part of the store that belongs to the group."""
        return group_store(store, self.index, self.epoch)


@dataclass(frozen=True)
class AttemptSpec:
    """One attempt. `carrier` is a message transport (the exact path), `full` or `disk`."""

    carrier: str
    senders: int  # trainer ranks
    bucket_bytes: int
    plan: str  # name of the world that is planned; "" where nothing is planned
    delta: bool  # whether buckets may travel as what changed
    keep: bool  # whether senders keep what they send
    modulus: int  # of the sample that is read back
    remainder: int
    servers: tuple[ServerGroup, ...]

    def places(self) -> Iterator[tuple[int, ServerGroup, int]]:
        """Every destination rank in order: its number in the plan, its server, and its rank there."""
        number = 0
        for server in self.servers:
            for rank in range(server.size):
                yield number, server, rank
                number += 1


def group_store(store: Store, server: int, epoch: int) -> PrefixStore:
    return PrefixStore(f"server/{server}/{epoch}", store)


def key(sequence: int, *parts: object) -> str:
    """Where the store holds a fact of attempt `sequence`."""
    return "/".join(map(str, (sequence, *parts)))


def write_attempt(store: Store, sequence: int, job: AttemptSpec | None) -> None:
    """None calls the attempt off."""
    write_bulk(store, key(sequence, "job"), None if job is None else asdict(job))


def read_attempt(store: Store, sequence: int, deadline: Deadline) -> AttemptSpec | None:
    found: dict[str, Any] | None = read_bulk(store, key(sequence, "job"), deadline)
    if found is None:
        return None
    return AttemptSpec(**(found | {"servers": tuple(ServerGroup(**server) for server in found["servers"])}))


def remove_attempt(store: Store, sequence: int, senders: int) -> None:
    """Deletes what the trainer's side wrote for an attempt that every rank is through with."""
    ranks = [("hash", "trainer"), ("outcome",), ("counts",)]
    names = [key(sequence, name) for name in ("job", "go", "verdict")]
    names += [key(sequence, *parts, rank) for parts in ranks for rank in range(senders)]
    names += [key(sequence, "outcome", rank) + "/sent" for rank in range(senders)]
    for name in names:
        store.delete_key(name)
