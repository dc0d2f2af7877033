"""A weight sync of the servers with the trainer: pause, begin, transfer, end, verify, version, continue.

All trainer ranks call `push` together. Rank 0 alone talks to the servers; ranks agree through a store, and every wait
on it has a deadline. A failure leaves the servers that took part paused: none of them serves a mix of versions. The
next push brings them everything. With reshard.on_failure=drop_server a push goes on without servers that fail.
"""

from __future__ import annotations

import hashlib
import json
import logging
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
from megarl.reshard.config import AUTO, OFF, ReshardConfig
from megarl.reshard.plan.transfer_plan import TransferPlan
from megarl.reshard.sync import full_tensor_path, shard_path
from megarl.reshard.sync.attempt import AttemptSpec, TransferTotals, delete_keys, key, read_spec, write_spec
from megarl.reshard.sync.coordinator import FAILURES, Coordinator, Retry, WeightSyncError
from megarl.reshard.sync.places import choose_relay, choose_transports
from megarl.reshard.sync.server_link import EXPLAIN_S, ServerLink
from megarl.reshard.sync.shard_path import ShardAttempt
from megarl.reshard.sync.trainer_rank import ShardView, TrainerRank
from megarl.reshard.sync.world import adapters_held, check_adapters, local_address
from megarl.reshard.transfer.digests import BucketSample
from megarl.reshard.transfer.store import Deadline, join_store, open_store, read, write, write_bulk
from megarl.reshard.transfer.transports import largest_bucket
from megarl.types import WeightUpdateMeta

log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """One trainer rank's side of a model whose weights are pushed. Implemented by the actor engine."""

    def shards(self) -> Sequence[ShardView]:
        """This rank's boxes of the checkpoint, as views of its live parameters."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every checkpoint tensor in full, on rank 0's host. A collective: all ranks iterate to the end."""


@dataclass(frozen=True)
class SyncReport:
    """The result of a push. Only rank 0 has more than the version."""

    version: int
    bytes: int = 0  # sent by the trainer, over all servers
    dense_bytes: int = 0  # bytes of the same weights without delta
    forwarded: int = 0  # bytes that servers sent on to others
    verified: int = 0  # tensor parts proven equal, over all ranks of all servers
    received: tuple[int, ...] = ()  # bytes, by each rank of each server
    servers: tuple[str, ...] = ()  # addresses that serve the version now
    seconds: dict[str, float] = field(default_factory=dict)  # per phase, in order
    transports: str = ""  # transports, the number of servers of each, and the reason; "" where full tensors were sent

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
        self.attempt_number = 0
        self.await_servers_s = 0.0  # seconds that rank 0 may wait for a server before an attempt
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if distributed else 0
        self.world_size = dist.get_world_size() if distributed else 1
        self._id = secrets.randbits(62)
        self._coordinator: Coordinator | None = None  # rank 0 has one
        if self.rank == 0:
            self._coordinator = Coordinator(config, addresses, api_key)
            self._store = open_store(config.host or own_address(), config.connect_deadline_s)
        host, port = broadcast_json([self._store.host, self._store.port] if self.rank == 0 else None)
        if self.rank != 0:
            self._store = join_store(host, port, config.connect_deadline_s)
        self._host, self._port = str(host), int(port)
        self._trainer_rank = TrainerRank(self._store, local_address(self._host, self._port), self.rank)
        self._last_world = ""  # on rank 0: name of the world of the last attempt
        self._transports = ""  # on rank 0: the transports of the last attempt, and why
        self._bucket_bytes = 0  # on rank 0: of the last attempt
        self._relay = OFF  # on rank 0: of the last attempt
        self._direct = False  # on rank 0: True once relays have failed in this sync
        self._attempts_since_anchor = 0
        self._receivers = 0  # on rank 0: most server ranks of an attempt
        self._futures: dict[int, Future[SyncReport]] = {}

    @property
    def plan(self) -> TransferPlan | None:
        """Plan of the last sync; None before it, and where whole tensors were sent."""
        return self._trainer_rank.plan

    # --- servers ---

    @property
    def healthy(self) -> list[str]:
        """Addresses of the servers that serve the current version. Empty on ranks other than 0."""
        return [link.address for link in self._coordinator.links if not link.dirty] if self._coordinator else []

    @property
    def dirty(self) -> list[str]:
        """Addresses of the servers that must get no request: their weights are unknown or not current."""
        return [link.address for link in self._coordinator.links if link.dirty] if self._coordinator else []

    def admit(self, address: str) -> None:
        """On rank 0: adds a server that joins late or was restarted.

        Keep requests from it until it is healthy: the next `push`, or `resync`, brings it all weights first.
        """
        assert self._coordinator is not None, "rank 0 knows the servers"
        self._coordinator.admit(address)

    def remove(self, address: str) -> None:
        """On rank 0: forgets a server that will not come back."""
        assert self._coordinator is not None, "rank 0 knows the servers"
        self._coordinator.remove(address)

    def set_death_probe(self, died: Callable[[str], bool]) -> None:
        """On rank 0: leaves servers reported dead out of a sync, under either reshard.on_failure.

        `died(address)` is True for a server that has died and that a supervisor will restart and admit.
        """
        assert self._coordinator is not None, "rank 0 knows the servers"
        self._coordinator.death_probe = died

    def served_version(self) -> int:
        """The highest version that any server serves, on every rank: a trainer that resumes must go above it."""
        return int(broadcast_json(self._coordinator.served_version() if self._coordinator else None))

    # --- the public order of calls: future = rollout.update_weights(meta); actor.upload_weights(meta); future.result()

    def expect(self, meta: WeightUpdateMeta) -> Future[SyncReport]:
        """On rank 0: a future that ends when `upload` has brought the servers to `meta.model_version`."""
        return self._futures.setdefault(meta.model_version, Future())

    def upload(self, weights: WeightSource, meta: WeightUpdateMeta) -> None:
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
        self, weights: WeightSource, version: int, *, transport: str | None = None, folder: Path | None = None
    ) -> SyncReport:
        """Brings every server to `weights`, served as `version`. Collective over the trainer ranks.

        `transport` and `folder` take precedence over the config's. Raises WeightSyncError on every rank when `version`
        is not above the last one, or when a server fails; with reshard.on_failure=drop_server only if none is left.
        """
        if version <= self.version:
            raise WeightSyncError(
                f"weights cannot be pushed as version {version} after {self.version}: versions only grow", phase="check"
            )
        report = self._sync(weights, version, transport or self.config.transport, folder)
        self.version = version
        return report

    def resync(self, weights: WeightSource) -> SyncReport:
        """Brings dirty servers to the version that the others serve; `weights` must be that version's.

        Collective. For servers admitted between two pushes; the others are paused and verified alike.
        """
        return self._sync(weights, self.version, self.config.transport, None)

    def close(self) -> None:
        """Leaves the groups. The servers go on serving the weights they have."""
        if self._coordinator is not None:
            for link in self._coordinator.links:
                link.leave()
        self._trainer_rank.leave()

    def _sync(self, weights: WeightSource, version: int, transport: str, folder: Path | None) -> SyncReport:
        """Makes attempts until one succeeds or the failure is final. After one with relays the others have none."""
        transport_name = "disk" if transport == "disk" else "full" if self.config.path == "full" else transport
        if transport_name == "disk" and folder is None:
            folder = Path(self.config.folder)
        self._direct = False
        while True:
            self.attempt_number += 1
            self._relay = OFF
            report, again = self._attempt(weights, version, transport_name, folder)
            if not again:
                return report
            plan = self._trainer_rank.plan
            if self._relay != OFF and plan is not None and plan.is_relayed:
                self._direct = True
                log.warning("attempt %d with relays failed; the trainer now sends to each server", self.attempt_number)

    def _attempt(
        self, weights: WeightSource, version: int, transport_name: str, folder: Path | None
    ) -> tuple[SyncReport, bool]:
        """Makes one attempt. Returns its report, and True if another one must follow, as servers were dropped."""
        is_full = transport_name in ("full", "disk")
        failure: Exception | None = None
        totals: TransferTotals | None = None
        spec: AttemptSpec | None = None
        if not is_full:
            self._trainer_rank.publish(weights.shards())
        if self._coordinator is not None:
            failure, spec = _guarded(lambda: self._prepare(version, transport_name))
            write_spec(self._store, self.attempt_number, spec)
        else:
            failure, spec = _guarded(
                lambda: read_spec(
                    self._store, self.attempt_number, Deadline(self.await_servers_s + self._verdict_deadline_s())
                )
            )
        if is_full:
            named = weights.named_weights()
            if self._coordinator is not None and spec is not None:
                failure, totals = _guarded(lambda: self._send_full_tensors(named, transport_name, folder))
            for _ in named:  # iterates the collective on other ranks, and on rank 0 after a failure
                pass
        elif spec is not None:
            attempt = ShardAttempt(
                self._store,
                self.attempt_number,
                spec,
                self._trainer_rank,
                self.config.connect_deadline_s,
                self.config.transfer_deadline_s,
            )
            failure, totals = _guarded(lambda: shard_path.run(attempt, self._coordinator))
        report = SyncReport(version)
        if self._coordinator is not None and failure is None and totals is not None:
            failure, _ = _guarded(lambda: self._commit(version))
            servers = tuple(link.address for link in self._coordinator.active)
            seconds = dict(self._coordinator.seconds)
            verified = sum(totals.verified.get(server, 0) for server in servers)  # not of one that died since
            report = SyncReport(
                version,
                totals.nbytes,
                totals.dense_nbytes,
                totals.forwarded,
                verified,
                totals.received,
                servers,
                seconds,
                "" if is_full else self._transports,
            )
        again = self._conclude(failure)
        return report, again

    # --- rank 0 ---

    def _prepare(self, version: int, transport_name: str) -> AttemptSpec:
        """Pauses the servers, sends them the order and reads their layouts. Returns the attempt's specification."""
        coordinator, config = self._coordinator, self.config
        assert coordinator is not None, "rank 0 prepares"
        wait_s = config.connect_deadline_s + config.transfer_deadline_s
        flush = config.pause_mode != "in_place"  # in_place: running requests keep their caches
        unchanged: list[bool] = []  # per server: clean, and still in the group of this transport

        def order(link: ServerLink) -> None:
            unchanged.append(link.joined(transport_name) and not link.dirty)
            link.open(self._store, self._host, self._port, self._id, self.attempt_number, transport_name, flush, wait_s)

        coordinator.begin(version, order, again=version == self.version)
        with coordinator.timed("connect", config.connect_deadline_s):
            deadline = Deadline(config.connect_deadline_s)
            coordinator.for_each(lambda link: link.read_layout(transport_name, deadline))
            world, adapters_only = "", False
            if transport_name not in ("full", "disk"):
                # A silent server has used up the phase's time, hence a new deadline: the rest is in the store already.
                deadline = Deadline(config.connect_deadline_s)
                world, adapters_only = self._publish_world(coordinator, transport_name, all(unchanged), deadline)
        self._attempts_since_anchor += 1
        delta = (
            config.delta
            and all(unchanged)
            and world == self._last_world
            and self._attempts_since_anchor < config.anchor_every
        )
        if not delta:
            self._attempts_since_anchor = 0
        self._last_world = world
        sample = BucketSample.of(config.verify, self.attempt_number)
        self._receivers = max(self._receivers, sum(link.tp_size for link in coordinator.active))
        return AttemptSpec(
            path=transport_name if transport_name in ("full", "disk") else "exact",
            senders=self.world_size,
            bucket_bytes=self._bucket_bytes,
            world=world,
            adapters_only=adapters_only,
            delta=delta,
            keep=config.delta,
            modulus=sample.modulus,
            remainder=sample.remainder,
            relays_connect_s=config.connect_deadline_s / 2,
            relayed_s=max(config.transfer_deadline_s - EXPLAIN_S, config.transfer_deadline_s / 2),
            servers=tuple(link.server_group for link in coordinator.active),
        )

    def _publish_world(
        self, coordinator: Coordinator, transport_name: str, unchanged: bool, deadline: Deadline
    ) -> tuple[str, bool]:
        """Writes the holdings and places of all ranks into the store, and settles the transports.

        Returns the world's name there, and True if the sync sends adapters alone: all servers are `unchanged` since
        the last one, which has brought them the base. Raises Retry if a server must join anew, by another transport.
        """
        world: dict[str, Any] = {
            "sources": [read(self._store, f"source/{rank}", deadline) for rank in range(self.world_size)],
            "servers": [link.layout for link in coordinator.active],
        }
        adapters = adapters_held(world["sources"])
        for link in coordinator.active:
            check_adapters(link.address, adapters_held(link.layout), adapters)
        world["adapters_only"] = bool(adapters) and unchanged
        choice = choose_transports(transport_name, world)
        relay = OFF if self._direct else self.config.relay_among(len(coordinator.active))
        relay, why_none = choose_relay(relay, choice, world)
        world["relay"] = relay
        self._transports = f"{choice}; {why_none}" if why_none else str(choice)
        world["bucket_bytes"] = bucket_bytes = self.config.bucket_bytes or largest_bucket(choice.names)
        kept = any(link.transport_name != AUTO for link in coordinator.active)  # groups have buckets of the last size
        grown = kept and transport_name == AUTO and bucket_bytes != self._bucket_bytes
        self._bucket_bytes = bucket_bytes
        if not all(link.use(name) for link, name in zip(coordinator.active, choice.names, strict=True)) or grown:
            raise Retry
        groups = [str(link.server_group) for link in coordinator.active]
        self._relay = relay
        name = hashlib.sha256(json.dumps([world, groups]).encode()).hexdigest()
        write_bulk(self._store, f"world/{name}", world)
        return name, world["adapters_only"]

    def _send_full_tensors(
        self, named: Iterator[tuple[str, Tensor]], transport_name: str, folder: Path | None
    ) -> TransferTotals:
        assert self._coordinator is not None, "rank 0 sends full tensors"
        return full_tensor_path.run(
            self._coordinator,
            named,
            folder if transport_name == "disk" else None,
            self._trainer_rank.address,
            verify=self.config.verify,
        )

    def _commit(self, version: int) -> None:
        assert self._coordinator is not None, "rank 0 commits"
        self._coordinator.commit(version)

    # --- verdicts ---

    def _conclude(self, failure: Exception | None) -> bool:
        """Shares rank 0's verdict on the attempt with all ranks.

        Returns True if another attempt must follow; raises WeightSyncError on every rank if the sync has failed.
        """
        verdict: Any = {}
        if self._coordinator is not None:
            if failure is not None:
                verdict = self._coordinator.give_up(failure)
            write(self._store, key(self.attempt_number, "verdict"), verdict)
        else:
            try:
                deadline = Deadline(self._verdict_deadline_s())
                verdict = read(self._store, key(self.attempt_number, "verdict"), deadline)
            except FAILURES as error:
                verdict = {
                    "message": f"trainer rank 0 did not report the outcome of the weight sync: {error}",
                    "rank": "0",
                }
        self._delete_previous_keys()
        if not verdict:
            return False
        self._trainer_rank.leave()
        if verdict.pop("retry", False):
            return True
        raise WeightSyncError(**verdict) from failure

    def _verdict_deadline_s(self) -> float:
        """Seconds within which rank 0 must have published the specification or the verdict."""
        config = self.config
        return 12 * config.control_deadline_s + config.connect_deadline_s + 2 * config.transfer_deadline_s

    def _delete_previous_keys(self) -> None:
        """Removes the previous attempt's keys from the store: every rank has read them."""
        if self.rank == 0 and self.attempt_number > 1:
            delete_keys(self._store, self.attempt_number - 1, self.world_size, self._receivers)


T = TypeVar("T")


def _guarded(step: Callable[[], T]) -> tuple[Exception | None, T | None]:
    """The failure of a step, which all ranks must hear of, or its result."""
    try:
        return None, step()
    except (*FAILURES, Retry) as error:
        return error, None
