"""Rollout servers of a run on every rank, and the syncs that bring them the trainer's weights.

Rank 0 alone talks to servers, through `Rank0Servers`. Every rank has a `WeightSync` and calls the same methods.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.actor.engine import MegatronEngine
from megarl.config import Config
from megarl.observe.logger import replace_text
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.parallel.broadcast import await_rank0, broadcast_json
from megarl.reshard.plan.traffic import traffic
from megarl.reshard.quantised_weights import QuantisedWeights
from megarl.reshard.session import SyncReport, WeightSession, WeightSource, WeightSyncError
from megarl.rollout.api import GenerationError
from megarl.rollout.closing import close_after
from megarl.rollout.executor import NoSamplesError, WorkflowError
from megarl.trainer.background_call import BackgroundCall
from megarl.trainer.rollouts.rank0_servers import Rank0Servers
from megarl.trainer.rollouts.shared_gpus import SeparateGpus, ServersInTurn, SharedGpus

CLOSE_S = 10.0  # time for a push under way, when the run has failed

Attempt = tuple[list[str], SyncReport]  # addresses of the restarted servers that took part, and the report


class Follower(Protocol):
    """Sampling of one policy, which follows the servers' versions. Every rank has one."""

    def before_sync(self, version: int) -> None:
        """Withholds answers of `version` until `after_sync` has judged the servers."""

    def after_sync(self, report: SyncReport) -> None:
        """Samples under the report's version, and compares the servers with the trainer. A collective.

        Raises:
            LogprobMismatchError: a server does not compute what the trainer does, and is not left out.
        """


@dataclass(frozen=True)
class Push:
    """A push under way in the background. `transfer` makes another attempt."""

    version: int
    transfer: Callable[[], SyncReport]
    background: BackgroundCall[Attempt]


class WeightSync:
    """A context manager. `version` is that of the trainer's weights on the servers.

    `outdated` is true after `connect` if the servers hold other weights than the trainer: then push before the first
    batch.
    """

    def __init__(self, config: Config, folder: RunFolder, is_rank0: bool) -> None:
        self.config = config
        self.folder = folder
        self.version = 0
        self.outdated = False
        self.gpus: SeparateGpus | SharedGpus = SeparateGpus()
        self._followers: dict[Follower, contextvars.Context] = {}
        self.note: Callable[[str], None] = lambda line: None  # prints a line above the progress display
        self._rank0 = Rank0Servers(config, folder.logs) if is_rank0 else None
        self._source: WeightSource | None = None
        self._session: WeightSession | None = None
        self._transports = ""  # of the last sync
        self._plan_hash = ""  # of the plan in sync_plan.json
        self._pushing: Push | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> WeightSync:
        if self._rank0 is not None:
            self._open.callback(self._rank0.close)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after(error, self._open.close)

    @property
    def rank0(self) -> Rank0Servers:
        assert self._rank0 is not None, "rank 0's alone"
        return self._rank0

    @property
    def session(self) -> WeightSession:
        assert self._session is not None, "connect() makes it"
        return self._session

    @property
    def source(self) -> WeightSource:
        assert self._source is not None, "connect() sets it"
        return self._source

    def start(self) -> None:
        """Has rank 0 start the servers, which load while the trainer is built."""
        if self._rank0 is not None:
            self._rank0.start()

    def follow(self, follower: Follower) -> None:
        """Calls `follower` at each sync, in a copy of the caller's context with its `stats_tracker` ledger."""
        self._followers[follower] = contextvars.copy_context()

    def dismiss(self, follower: Follower) -> None:
        """Calls `follower` no more."""
        del self._followers[follower]

    def connect(self, source: WeightSource, version: int, engines: Sequence[MegatronEngine], as_served: bool) -> None:
        """Waits for the servers and connects the session that pushes the weights of `source`. A collective.

        The servers hold the checkpoint that the run began with, `version` 0; quantised ones begin without weights.
        `as_served` is True if the trainer began with the same. `engines` are all that are trained: co-located servers
        take their memory in turn.
        """
        format = self.config.server.format
        self._source = source if format is None else QuantisedWeights(source, format, engines[0].groups.tp)
        addresses: list[str] = []
        key = ""
        if self.config.server.colocate:
            self.gpus = SharedGpus(engines, self.config.actor.offload_while_sampling)
        self.gpus.for_sampling()
        if self._rank0 is not None:
            self._rank0.connect()
            addresses, key = self._rank0.addresses, self._rank0.api_key
            self.gpus.servers = ServersInTurn(self._rank0.supervisor, key, self.config.reshard.control_deadline_s)
        await_rank0(self.config.parallel.timeout_s)  # whose servers load, maybe on these GPUs
        session = self._session = WeightSession(self.config.reshard, addresses, key)
        session.await_servers_s = self.config.server.ready_timeout_s
        self._open.callback(session.close)
        self._open.callback(self._abandon)
        if self._rank0 is not None:
            session.set_death_probe(self._rank0.supervisor.died)
        # Servers that outlived a trainer may serve a version above its checkpoint's. Versions continue above theirs.
        served = session.served_version()
        self.outdated = bool(served or version or not as_served or format is not None)
        self.version = max(version, served + 1) if self.outdated else version
        if not self.outdated:
            session.version = self.version  # a server restarted before the first push is brought this version

    def push(self, version: int) -> None:
        """Brings the weights to the servers as `version`, and proves them equal. A collective."""
        source = self.source
        self._sync(version, lambda: self.session.push(source, version))

    def begin_push(self, version: int) -> None:
        """Begins a `push` in the background. Until `end_push` the weights must not change. A collective."""
        source = self.source
        self._announce(version)
        source.shards()  # gathers what the optimizer left split: two threads must not, and only one would wait for it

        def transfer() -> SyncReport:
            return self.session.push(source, version)

        self._pushing = Push(version, transfer, BackgroundCall("weights", lambda: self._attempt(transfer)))

    @property
    def is_pushing(self) -> bool:
        """True between `begin_push` and `end_push`."""
        return self._pushing is not None

    def has_transferred(self) -> bool:
        """True once the push under way waits for `end_push` alone."""
        return self._pushing is not None and self._pushing.background.done

    def end_push(self) -> None:
        """Waits for the push that was begun, and ends it as `push` does. Nothing without one. A collective."""
        if self._pushing is not None:
            push, self._pushing = self._pushing, None
            self._complete(push.version, push.transfer, push.background.result)

    def _abandon(self) -> None:
        """Gives the push of a run that has failed meanwhile some seconds, before the session ends it."""
        if self._pushing is not None:
            self._pushing.background.wait(CLOSE_S)

    def resync(self) -> None:
        """Brings the version that the trainer has to servers without it. A collective."""
        source = self.source
        self._sync(self.session.version, lambda: self.session.resync(source))

    def _sync(self, version: int, transfer: Callable[[], SyncReport]) -> None:
        """Runs `transfer`, which brings `version` to the servers that are alive, and has the followers judge them.

        A collective. Restarted servers take part. A server that dies meanwhile is left out; if it was the last one, a
        restarted one is awaited. A server that lives and fails ends the run, or is left out too with
        reshard.on_failure=drop_server.

        Raises:
            LogprobMismatchError: a server does not compute what the trainer does, and is not left out.
        """
        self._announce(version)
        self._complete(version, transfer, lambda: self._attempt(transfer))

    def _announce(self, version: int) -> None:
        self.gpus.for_sync()
        for follower, context in self._followers.items():
            context.run(follower.before_sync, version)

    def _attempt(self, transfer: Callable[[], SyncReport]) -> Attempt:
        """Admits restarted servers and transfers. Returns their addresses, on rank 0, and the report."""
        admitted: list[str] = []
        if self._rank0 is not None:
            with self.attributed_to_dead_servers():
                admitted, left_out = self._rank0.supervisor.before_sync(self.config.server.ready_timeout_s)
            for address in left_out:
                self.session.remove(address)
            for address in admitted:
                self.session.admit(address)
        return admitted, transfer()

    def _complete(self, version: int, transfer: Callable[[], SyncReport], attempt: Callable[[], Attempt]) -> None:
        """Awaits `attempt`, repeats it where it failed and may be repeated, and has the followers judge the servers."""
        while True:
            try:
                admitted, report = attempt()
                break
            except WeightSyncError as error:
                if not broadcast_json(self._rank0 is not None and self._should_retry(self._rank0, error)):
                    with self.attributed_to_dead_servers():
                        raise
                attempt = functools.partial(self._attempt, transfer)
        if self._rank0 is not None:
            self._rank0.supervisor.after_sync(self.session.healthy)  # no requests to a server that was dropped
            self._record(report, brought_back=len(set(admitted) & set(report.servers)))
        self.version = version
        self.gpus.for_sampling()
        for follower, context in self._followers.items():
            context.run(follower.after_sync, report)

    def leave_out(self, addresses: Iterable[str]) -> None:
        """On rank 0: goes on without these servers, which live and fail."""
        for address in addresses:
            self.session.remove(address)
        self.rank0.supervisor.after_sync(self.session.healthy)

    def _should_retry(self, rank0: Rank0Servers, error: WeightSyncError) -> bool:
        """True if the last server failed the sync and a restarted one may come."""
        supervisor, drop = rank0.supervisor, self.config.reshard.on_failure == "drop_server"
        if not error.server or not (drop or supervisor.died(error.server)):
            return False
        supervisor.after_sync([])
        return supervisor.outlook() != "none"

    def _record(self, report: SyncReport, brought_back: int) -> None:
        if report.transports not in ("", self._transports):
            self._transports = report.transports
            self.note(f"weights travel by {report.transports}")
        self._keep_plan(report)
        with stats_tracker.scope("sync"):
            stats_tracker.scalar(
                verified=float(report.verified > 0),
                verified_parts=report.verified,
                mbytes=report.bytes / 1e6,
                relayed_mbytes=report.forwarded / 1e6,
                delta_saving=1 - report.bytes / report.dense_bytes,
                servers=len(report.servers),
            )
            stats_tracker.total(syncs=float(report.version > self.version))  # not after a resume, or to a late server
            stats_tracker.total(servers_brought_back=brought_back)  # restarted, then given all weights, proven

    def _keep_plan(self, report: SyncReport) -> None:
        """Writes `sync_plan.json` when the plan is a new one. Whole tensors are sent without a plan."""
        plan = self.session.plan
        if plan is None or plan.hash == self._plan_hash:
            return
        self._plan_hash = plan.hash
        facts = traffic(plan) | {"transports": report.transports, "servers": list(report.servers)}
        replace_text(self.folder.sync_plan, json.dumps(facts | {"version": report.version}) + "\n")

    @contextlib.contextmanager
    def attributed_to_dead_servers(self) -> Iterator[None]:
        """Replaces an error by the death of the server at fault, with its log, or of the last that served."""
        try:
            yield
        except NoSamplesError:  # ends the run on every rank, with its last step saved
            raise
        except (WorkflowError, GenerationError, WeightSyncError, TimeoutError) as error:
            if self._rank0 is not None:
                self._rank0.supervisor.raise_cause(getattr(error, "server", ""))
            raise
