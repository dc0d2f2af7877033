"""A trainer rank's place in the groups with the servers, kept between syncs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import Store

from megarl.reshard.plan.holdings import Box, Fragment
from megarl.reshard.plan.transfer_plan import TransferPlan
from megarl.reshard.sync.attempt import AttemptSpec, key
from megarl.reshard.sync.world import describe, make_plan, publish
from megarl.reshard.transfer.digests import Sample
from megarl.reshard.transfer.shard_transfer import Counts, Route, ShardSender
from megarl.reshard.transfer.store import Deadline, read_bulk, write, write_bulk
from megarl.reshard.transfer.transports import transport_named
from megarl.reshard.transfer.transports.base import Staging, Transport


class ShardView(Protocol):
    """The box `[start, stop)` of checkpoint tensor `name` that `view`, a view of a live parameter, holds."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> tuple[int, ...]: ...
    @property
    def stop(self) -> tuple[int, ...]: ...
    @property
    def view(self) -> Tensor: ...


def fragments_of(rank: int, shards: Sequence[ShardView]) -> list[Fragment]:
    """A trainer rank's shards as the planner knows them. Shards of nothing (vocabulary padding) are left out."""
    return [
        Fragment(rank, shard.name, Box(shard.name, shard.start, shard.stop), shard.view.detach())
        for shard in shards
        if all(a < b for a, b in zip(shard.start, shard.stop, strict=True))
    ]


class TrainerRank:
    """One trainer rank. Call, for each attempt and on every rank: `prepare`, then `transfer`; `leave` after a failure.

    `address` is what this rank listens on; `store` is the session's.
    """

    def __init__(self, store: Store, address: str, rank: int):
        self.store = store
        self.address = address
        self.rank = rank
        self.groups: dict[tuple[int, int], Transport] = {}
        self.staging: Staging | None = None
        self.sender: ShardSender | None = None
        self.plan: TransferPlan | None = None
        self._fragments: list[Fragment] = []
        self._described: Any = None
        self._carrier = ""  # that the staging memory and the groups are of
        self._world = ""  # name of the world that the plan is of

    def publish(self, shards: Sequence[ShardView]) -> None:
        """Says what this rank holds; once, as the layout of a run does not change.

        Raises ValueError where it has changed all the same.
        """
        fragments = fragments_of(self.rank, shards)
        described = describe(fragments)
        if self._described is None:
            write(self.store, f"source/{self.rank}", publish(self.store, fragments))
            self._described = described
        elif described != self._described:
            raise ValueError(f"trainer rank {self.rank} holds other parts of the model than at its first sync")
        moved = [f.view.data_ptr() for f in fragments] != [f.view.data_ptr() for f in self._fragments]
        self._fragments = fragments
        if moved:
            self.sender = None

    def prepare(self, job: AttemptSpec, deadline: Deadline) -> str:
        """Joins the groups that this rank is not in yet and makes the plan. Returns the plan's hash."""
        transport = transport_named(job.carrier)
        wanted = {(s.index, s.epoch): s for s in job.servers}
        for known in list(self.groups):
            if known not in wanted:
                self.groups.pop(known).abort()
        if self.staging is None or self._carrier != job.carrier:
            self.leave()
            self.staging, self._carrier = transport.make_staging(job.bucket_bytes), job.carrier
        for identity, server in wanted.items():
            if identity not in self.groups:
                size = job.senders + server.size
                store = server.private(self.store)
                self.groups[identity] = transport(store, self.address, self.rank, size, deadline.left(), self.staging)
                self.sender = None
        if self.plan is None or self._world != job.plan:
            self.plan = make_plan(self.store, read_bulk(self.store, f"world/{job.plan}", deadline), deadline)
            self.sender, self._world = None, job.plan
        if self.sender is None:
            self.sender = ShardSender(
                self.plan, self.rank, self._fragments, self._routes(job), self.staging, keep=job.keep
            )
        return self.plan.hash

    def _routes(self, job: AttemptSpec) -> dict[int, Route]:
        return {
            number: Route(f"rank {rank} of server {s.index}", self.groups[s.index, s.epoch], job.senders + rank)
            for number, s, rank in job.places()
        }

    def transfer(self, sequence: int, job: AttemptSpec, deadline: Deadline) -> dict[str, Any]:
        """Sends this rank's part. Returns JSON: bytes sent, bytes without delta, digests of the sampled buckets.

        Raises:
            TransferError: see `Sender.send`.
        """
        assert self.sender is not None, "prepare first"
        counts: Counts = self.sender.counts() if job.delta else {}
        if job.delta:
            write_bulk(self.store, key(sequence, "counts", self.rank), list(counts.items()))
        sent = self.sender.send(deadline, Sample(job.modulus, job.remainder), counts)
        return {"bytes": sent.nbytes, "dense_bytes": sent.dense_nbytes, "digests": list(sent.digests.items())}

    def leave(self) -> None:
        """Ends the connections with every server, and forgets what they hold. Peers that wait get an error."""
        for group in self.groups.values():
            group.abort()
        self.groups.clear()
        if self.staging is not None:
            self.staging.close()
        self.staging = self.sender = None
