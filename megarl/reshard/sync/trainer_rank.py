"""A trainer rank's place in the groups with the servers, kept between syncs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import Store

from megarl.reshard.plan.holdings import Box, ComputedValues, Fragment, sent
from megarl.reshard.plan.transfer_plan import TransferPlan
from megarl.reshard.sync.attempt import AttemptSpec, key
from megarl.reshard.sync.world import describe_fragments, make_plan, publish_fragments
from megarl.reshard.transfer.digests import BucketSample
from megarl.reshard.transfer.shard_transfer import Counts, Route, ShardSender
from megarl.reshard.transfer.store import Deadline, read_bulk, write, write_bulk
from megarl.reshard.transfer.transports import transport_named
from megarl.reshard.transfer.transports.base import Staging, Transport


class ShardView(Protocol):
    """A view of a live parameter that holds the box `[start, stop)` of checkpoint tensor `name`."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> tuple[int, ...]: ...
    @property
    def stop(self) -> tuple[int, ...]: ...
    @property
    def view(self) -> Tensor | ComputedValues: ...


def fragments_of(rank: int, shards: Sequence[ShardView]) -> list[Fragment]:
    """A trainer rank's shards as fragments. Empty shards (vocabulary padding) are left out."""
    return [
        Fragment(rank, shard.name, Box(shard.name, shard.start, shard.stop), shard.view.detach())
        for shard in shards
        if all(a < b for a, b in zip(shard.start, shard.stop, strict=True))
    ]


class TrainerRank:
    """One trainer rank. Call, for each attempt and on every rank: `prepare`, then `transfer`; `leave` after a failure.

    `address` is this rank's listening address; `store` is the session's.
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
        self._memory = ""  # kind of the staging memory
        self._world = ""  # name of the world that the plan is for

    def publish(self, shards: Sequence[ShardView]) -> None:
        """Publishes this rank's boxes; once, as the layout of a run does not change.

        Raises ValueError if it has changed nevertheless.
        """
        fragments = fragments_of(self.rank, shards)
        described = describe_fragments(fragments)
        if self._described is None:
            write(self.store, f"source/{self.rank}", publish_fragments(self.store, fragments))
            self._described = described
        elif described != self._described:
            raise ValueError(f"trainer rank {self.rank} holds other parts of the model than at its first sync")
        reallocated = [f.view.data_ptr() for f in fragments] != [f.view.data_ptr() for f in self._fragments]
        self._fragments = fragments
        if reallocated:
            self.sender = None

    def prepare(self, spec: AttemptSpec, deadline: Deadline) -> str:
        """Makes the plan and joins the groups that this rank is not in yet. Returns the plan's hash.

        Both sides plan first. Where they do not fit, no rank connects, and no lost connection hides the cause.
        """
        servers = {(s.index, s.epoch): s for s in spec.servers}
        transport_of = {identity: transport_named(server.transport_name) for identity, server in servers.items()}
        (memory,) = {
            transport_class.memory for transport_class in transport_of.values()
        }  # `choose_transports` sees to it
        for joined in list(self.groups):
            if joined not in servers:
                self.groups.pop(joined).abort()
        if self.plan is None or self._world != spec.world:
            self.plan = make_plan(self.store, read_bulk(self.store, f"world/{spec.world}", deadline), deadline)
            self.sender, self._world = None, spec.world
        if self.staging is None or self._memory != memory or len(self.staging.slots[0]) != spec.bucket_bytes:
            self.leave()
            self.staging = next(iter(transport_of.values())).make_staging(spec.bucket_bytes)
            self._memory = memory
        for identity, server in servers.items():
            if identity not in self.groups:
                size = spec.senders + server.size
                store = server.private_store(self.store)
                self.groups[identity] = transport_of[identity](
                    store, self.address, self.rank, size, deadline.left(), self.staging
                )
                self.sender = None
        if self.sender is None:
            self.sender = ShardSender(
                self.plan,
                self.rank,
                sent(self._fragments, spec.adapters_only),
                self._routes(spec),
                self.staging,
                keep=spec.keep,
            )
        return self.plan.hash

    def _routes(self, spec: AttemptSpec) -> dict[int, Route]:
        return {
            number: Route(f"rank {rank} of server {s.index}", self.groups[s.index, s.epoch], spec.senders + rank)
            for number, s, rank in spec.server_ranks()
        }

    def transfer(self, attempt_number: int, spec: AttemptSpec, deadline: Deadline) -> dict[str, Any]:
        """Sends this rank's part. Returns JSON: bytes sent, bytes without delta, digests of the sampled buckets.

        Raises:
            TransferError: see `ShardSender.send`.
        """
        assert self.sender is not None, "prepare first"
        counts: Counts = self.sender.counts() if spec.delta else {}
        if spec.delta:
            write_bulk(self.store, key(attempt_number, "counts", self.rank), list(counts.items()))
        report = self.sender.send(deadline, BucketSample(spec.modulus, spec.remainder), counts)
        return {"bytes": report.nbytes, "dense_bytes": report.dense_nbytes, "digests": list(report.digests.items())}

    def leave(self) -> None:
        """Ends the connections with every server and drops the sender's copies. Peers that wait get an error."""
        for group in self.groups.values():
            group.abort()
        self.groups.clear()
        if self.staging is not None:
            self.staging.close()
        self.staging = self.sender = None
