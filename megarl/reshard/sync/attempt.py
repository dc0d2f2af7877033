"""One attempt of a sync, as all ranks see it in the store: rank 0's specification, and the totals at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import PrefixStore, Store

from megarl.reshard.transfer.store import Deadline, read_bulk, write_bulk


@dataclass(frozen=True)
class ServerGroup:
    """The group of the trainer ranks with one server that takes part.

    `index`: the server's number in the session; `epoch`: counts the groups made with it; `size`: its ranks;
    `transport_name`: a message transport on the exact path, "" where it is not known yet.
    """

    index: int
    epoch: int
    size: int
    transport_name: str = ""

    def private_store(self, store: Store) -> PrefixStore:
        """The part of the store that belongs to the group."""
        return PrefixStore(f"server/{self.index}/{self.epoch}", store)


@dataclass(frozen=True)
class AttemptSpec:
    """Rank 0's instructions for one attempt, equal for every rank of both sides."""

    path: str  # "exact": shards by each server's transport; "full" or "disk": full tensors, broadcast or as files
    senders: int  # trainer ranks
    bucket_bytes: int
    world: str  # name of the world that is planned for; "" on the full path, which has no plan
    adapters_only: bool  # True: the base stays as it is on the servers
    delta: bool  # True: buckets may travel as deltas
    keep: bool  # True: senders keep a copy of all sent buckets
    modulus: int  # of the sampled buckets that are read back (`BucketSample`)
    remainder: int
    relays_connect_s: float  # time for server ranks to connect with each other; then they learn of the next attempt
    relayed_s: float  # time for a server rank to receive and send on; less than the trainer waits
    servers: tuple[ServerGroup, ...]

    def server_ranks(self) -> Iterator[tuple[int, ServerGroup, int]]:
        """Yields every destination rank in order: its number in the plan, its server, and its rank there."""
        number = 0
        for server in self.servers:
            for rank in range(server.size):
                yield number, server, rank
                number += 1


@dataclass(frozen=True)
class TransferTotals:
    """An attempt's bytes: sent, sent without delta, sent on by servers. Parts proven equal by server; bytes by rank."""

    nbytes: int = 0
    dense_nbytes: int = 0
    forwarded: int = 0
    verified: dict[str, int] = field(default_factory=dict)
    received: tuple[int, ...] = ()


def key(attempt_number: int, *parts: object) -> str:
    """Store key of a value that belongs to one attempt."""
    return "/".join(map(str, (attempt_number, *parts)))


def write_spec(store: Store, attempt_number: int, spec: AttemptSpec | None) -> None:
    """Publishes the specification; None calls the attempt off."""
    write_bulk(store, key(attempt_number, "spec"), None if spec is None else asdict(spec))


def read_spec(store: Store, attempt_number: int, deadline: Deadline) -> AttemptSpec | None:
    """Waits for the specification; None if the attempt is called off."""
    fields: dict[str, Any] | None = read_bulk(store, key(attempt_number, "spec"), deadline)
    if fields is None:
        return None
    return AttemptSpec(**(fields | {"servers": tuple(ServerGroup(**server) for server in fields["servers"])}))


def delete_keys(store: Store, attempt_number: int, senders: int, receivers: int) -> None:
    """Deletes the keys of an attempt that every rank has finished; of server ranks, it had at most `receivers`.

    What a rank writes to its own server's part of the store stays: `ServerLink.finish` deletes it.
    """
    per_rank = [("hash", "trainer"), ("outcome",), ("counts",)]
    names = [key(attempt_number, name) for name in ("spec", "go", "verdict")]
    names += [key(attempt_number, *parts, rank) for parts in per_rank for rank in range(senders)]
    names += [key(attempt_number, "outcome", rank) + "/sent" for rank in range(senders)]
    names += [key(attempt_number, "hash", "server", number) for number in range(receivers)]
    for name in names:
        store.delete_key(name)
