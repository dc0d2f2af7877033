"""A sync of the servers with the trainer's weights: pause, begin, transfer, end, verify, version, continue.

All trainer ranks call `push` together. Rank 0 alone talks to the servers; ranks agree through a store, every wait of
which has a deadline. A failure leaves the servers that took part paused: none of them serves a mix of versions. The
next push brings them everything. With reshard.on_failure=drop_server a push goes on without servers that fail.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from megarl.parallel.broadcast import broadcast_json
from megarl.parallel.rendezvous import own_address
from megarl.reshard.config import ReshardConfig
from megarl.reshard.sync import full_tensor_path, shard_path
from megarl.reshard.sync.attempt import AttemptSpec, key, read_attempt, remove_attempt, write_attempt
from megarl.reshard.sync.coordinator import FAILURES, Coordinator, Retry, WeightSyncError
from megarl.reshard.sync.server_link import ServerLink
from megarl.reshard.sync.shard_path import Attempt, TransferOutcome
from megarl.reshard.sync.trainer_rank import ShardView, TrainerRank
from megarl.reshard.sync.world import local_address
from megarl.reshard.transfer.digests import Sample
from megarl.reshard.transfer.store import Deadline, join_store, open_store, read, write, write_bulk
from megarl.types import WeightUpdateMeta


class Weights(Protocol):
    """What is pushed: one trainer rank's side of a model. The actor's engines are such."""

    def shards(self) -> Sequence[ShardView]:
        """The boxes of the checkpoint that this rank holds, as views of its live parameters."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every checkpoint tensor whole, on rank 0's host; a collective, iterated to its end by all ranks."""


@dataclass(frozen=True)
class SyncReport:
    """What a push did. Only rank 0 has more than the version."""

    version: int
    bytes: int = 0  # sent, over all servers
    dense_bytes: int = 0  # what that would have been without delta
    verified: int = 0  # pieces of tensors proven equal, over all ranks of all servers
    received: tuple[int, ...] = ()  # bytes, by each rank of each server
    servers: tuple[str, ...] = ()  # that serve the version now
    seconds: dict[str, float] = field(default_factory=dict)  # per phase, in order

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


class WeightSession:
    """Keeps the servers at `addresses` (`host:port`) at the trainer's weights, version by version.

    Made by all ranks of the default process group together (or by a single process); `addresses` and `api_key` are
    read on rank 0.
    """

    def __init__(self, config: ReshardConfig, addresses: Sequence[str], api_key: str):
        self.config = config
        self.version = 0
        self.sequence = 0  # of attempts
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self._id = secrets.randbits(62)
        self._chief: Coordinator | None = None
        if self.rank == 0:
            self._chief = Coordinator(config, addresses, api_key)
            self._store = open_store(config.host or own_address(), config.connect_deadline_s)
        host, port = broadcast_json([self._store.host, self._store.port] if self.rank == 0 else None)
        if self.rank != 0:
            self._store = join_store(host, port, config.connect_deadline_s)
        self._host, self._port = str(host), int(port)
        self._member = TrainerRank(self._store, local_address(self._host, self._port), self.rank)
        self._planned = ""  # rank 0: the world of the last attempt
        self._since_anchor = 0
        self._futures: dict[int, Future[SyncReport]] = {}

    # --- servers ---

    @property
    def healthy(self) -> list[str]:
        """Addresses of the servers that serve the current version. On rank 0; others get none."""
        return [link.address for link in self._chief.links if not link.dirty] if self._chief else []

    @property
    def dirty(self) -> list[str]:
        """Addresses of the servers that must not be asked: what they hold is not known, or not current."""
        return [link.address for link in self._chief.links if link.dirty] if self._chief else []

    def admit(self, address: str) -> None:
        """On rank 0: counts in a server that joins late or was restarted. Keep requests from it until it is healthy:
        the next `push`, or `resync`, brings it all weights first."""
        assert self._chief is not None, "rank 0 knows the servers"
        self._chief.admit(address)

    def remove(self, address: str) -> None:
        """On rank 0: forgets a server that will not come back."""
        assert self._chief is not None, "rank 0 knows the servers"
        self._chief.remove(address)

    def forgive(self, died: Callable[[str], bool]) -> None:
        """On rank 0: a server of which `died(address)` says that it has is left out of a sync whatever
        reshard.on_failure says: somebody starts it again, and admits it."""
        assert self._chief is not None, "rank 0 knows the servers"
        self._chief.died = died

    def served_version(self) -> int:
        """The highest version that any server serves, on every rank: a trainer that resumes must go above it."""
        return int(broadcast_json(self._chief.served_version() if self._chief else None))

    # --- the public order of calls: future = rollout.update_weights(meta); actor.upload_weights(meta); future.result()

    def expect(self, meta: WeightUpdateMeta) -> Future[SyncReport]:
        """On rank 0: a future that ends when `upload` has brought the servers to `meta.model_version`."""
        return self._futures.setdefault(meta.model_version, Future())

    def upload(self, weights: Weights, meta: WeightUpdateMeta) -> None:
        """Pushes by the transport that `meta` names. A collective; a failure is raised here and in the future."""
        future = self._futures.pop(meta.model_version, None) or Future()
        try:
            folder = Path(meta.path) if meta.path else None
            future.set_result(self.push(weights, meta.model_version, transport=meta.type, folder=folder))
        except BaseException as error:
            future.set_exception(error)
            raise

    # --- a sync ---

    def push(
        self, weights: Weights, version: int, *, transport: str | None = None, folder: Path | None = None
    ) -> SyncReport:
        """Brings every server to `weights`, served as `version`. Collective over the trainer ranks.

        `transport` and `folder` stand in for those of the config. Raises WeightSyncError on every rank when `version`
        is not above the last one, and when a server fails, by reshard.on_failure only if none is left.
        """
        if version <= self.version:
            raise WeightSyncError(
                f"weights cannot be pushed as version {version} after {self.version}: versions only grow", phase="check"
            )
        report = self._until_done(weights, version, transport or self.config.transport, folder)
        self.version = version
        return report

    def resync(self, weights: Weights) -> SyncReport:
        """Brings servers that are dirty to the version that the others serve; `weights` must be those of it.

        Collective. For servers admitted between two pushes; the others are paused and verified alike.
        """
        return self._until_done(weights, self.version, self.config.transport, None)

    def close(self) -> None:
        """Leaves the groups. The servers go on serving what they have."""
        if self._chief is not None:
            for link in self._chief.links:
                link.leave()
        self._member.leave()

    def _until_done(self, weights: Weights, version: int, transport: str, folder: Path | None) -> SyncReport:
        carrier = "disk" if transport == "disk" else "full" if self.config.path == "full" else transport
        if carrier == "disk" and folder is None:
            folder = Path(self.config.folder)
        while True:
            self.sequence += 1
            report, again = self._attempt(weights, version, carrier, folder)
            if not again:
                return report

    def _attempt(self, weights: Weights, version: int, carrier: str, folder: Path | None) -> tuple[SyncReport, bool]:
        """One attempt. Returns whether another one must follow, as servers were dropped."""
        whole = carrier in ("full", "disk")
        failure: Exception | None = None
        moved: TransferOutcome | None = None
        job: AttemptSpec | None = None
        if not whole:
            self._member.publish(weights.shards())
        if self._chief is not None:
            failure, job = _guarded(lambda: self._prepare(version, carrier))
            write_attempt(self._store, self.sequence, job)
        else:
            failure, job = _guarded(lambda: read_attempt(self._store, self.sequence, Deadline(self._patience())))
        if whole:
            named = weights.named_weights()
            if self._chief is not None and job is not None:
                failure, moved = _guarded(lambda: self._whole(named, carrier, folder))
            for _ in named:  # the other ranks, and rank 0 after a failure
                pass
        elif job is not None:
            attempt = Attempt(
                self._store,
                self.sequence,
                job,
                self._member,
                self.config.connect_deadline_s,
                self.config.transfer_deadline_s,
            )
            failure, moved = _guarded(lambda: shard_path.run(attempt, self._chief))
        report = SyncReport(version)
        if self._chief is not None and failure is None and moved is not None:
            failure, _ = _guarded(lambda: self._commit(version))
            served = tuple(link.address for link in self._chief.active)
            seconds = dict(self._chief.seconds)
            report = SyncReport(
                version, moved.nbytes, moved.dense_nbytes, moved.verified, moved.received, served, seconds
            )
        again = self._conclude(failure)
        return report, again

    # --- rank 0 ---

    def _prepare(self, version: int, carrier: str) -> AttemptSpec:
        """Pauses the servers, sends them the order and learns what they hold. Returns what is to be done."""
        chief, config = self._chief, self.config
        assert chief is not None, "rank 0 prepares"
        wait_s = config.connect_deadline_s + config.transfer_deadline_s
        flush = config.pause_mode != "in_place"  # there running requests keep their caches
        stayed: list[bool] = []

        def order(link: ServerLink) -> None:
            stayed.append(link.carrier == carrier and not link.dirty)
            link.open(self._store, self._host, self._port, self._id, self.sequence, carrier, flush, wait_s)

        chief.begin(version, order, again=version == self.version)
        with chief.timed("connect", config.connect_deadline_s):
            deadline = Deadline(config.connect_deadline_s)
            chief.each(lambda link: link.join(carrier, deadline))
            # A server that was silent has used up the phase's time: what the others told is there already.
            world = "" if carrier in ("full", "disk") else self._describe(chief, Deadline(config.connect_deadline_s))
        self._since_anchor += 1
        delta = config.delta and all(stayed) and world == self._planned and self._since_anchor < config.anchor_every
        if not delta:
            self._since_anchor = 0
        self._planned = world
        sample = Sample.of(config.verify, self.sequence)
        return AttemptSpec(
            carrier=carrier,
            senders=self.world_size,
            bucket_bytes=config.bucket_bytes,
            plan=world,
            delta=delta,
            keep=config.delta,
            modulus=sample.modulus,
            remainder=sample.remainder,
            servers=tuple(link.member for link in chief.active),
        )

    def _describe(self, chief: Coordinator, deadline: Deadline) -> str:
        """Writes who holds what into the store, where it is not known yet. Returns its name there."""
        world: dict[str, Any] = {
            "sources": [read(self._store, f"source/{rank}", deadline) for rank in range(self.world_size)],
            "servers": [link.layout for link in chief.active],
            "bucket_bytes": self.config.bucket_bytes,
        }
        nodes = {rank["node"] for side in [world["sources"], *world["servers"]] for rank in side}
        if self.config.transport in ("shm", "cuda_ipc") and len(nodes) > 1:
            raise ValueError(f"reshard.transport={self.config.transport} stays on one machine; found {sorted(nodes)}")
        name = hashlib.sha256(json.dumps([world, [str(link.member) for link in chief.active]]).encode()).hexdigest()
        write_bulk(self._store, f"world/{name}", world)
        return name

    def _whole(self, named: Iterator[tuple[str, Tensor]], carrier: str, folder: Path | None) -> TransferOutcome:
        assert self._chief is not None, "rank 0 sends whole tensors"
        return full_tensor_path.run(
            self._chief, named, folder if carrier == "disk" else None, self._member.address, verify=self.config.verify
        )

    def _commit(self, version: int) -> None:
        assert self._chief is not None, "rank 0 commits"
        self._chief.commit(version)

    # --- verdicts ---

    def _conclude(self, failure: Exception | None) -> bool:
        """Tells all ranks how rank 0 fared. Returns whether to try again; raises on each of them if it failed."""
        told: Any = {}
        if self._chief is not None:
            if failure is not None:
                told = self._chief.give_up(failure)
            write(self._store, key(self.sequence, "verdict"), told)
        else:
            try:
                told = read(self._store, key(self.sequence, "verdict"), Deadline(self._patience()))
            except FAILURES as error:
                told = {"message": f"trainer rank 0 did not tell how the weight sync went: {error}", "rank": "0"}
        self._forget()
        if not told:
            return False
        self._member.leave()
        if told.pop("retry", False):
            return True
        raise WeightSyncError(**told) from failure

    def _patience(self) -> float:
        """Seconds within which rank 0 must have told the others how a phase went."""
        config = self.config
        return 12 * config.control_deadline_s + config.connect_deadline_s + 2 * config.transfer_deadline_s

    def _forget(self) -> None:
        """Removes from the store what attempts before the last one wrote: every rank has read it."""
        if self.rank == 0 and self.sequence > 1:
            remove_attempt(self._store, self.sequence - 1, self.world_size)


T = TypeVar("T")


def _guarded(step: Callable[[], T]) -> tuple[Exception | None, T | None]:
    """What a step returns, or the failure that all ranks must hear of."""
    try:
        return None, step()
    except (*FAILURES, Retry) as error:
        return error, None
