"""Rollouts of a run on every rank: batches, evaluations and weight syncs.

Rank 0 alone talks to servers, through `Rank0Rollouts`. Every rank has a `RolloutDriver` and calls the same methods.
Rank 0's batches reach the others as packed tensors.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from megarl.algorithms import Algorithm
from megarl.config import Config
from megarl.observe.logger import replace_text
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.parallel.broadcast import broadcast_batch, broadcast_json
from megarl.reshard.plan.traffic import traffic
from megarl.reshard.session import SyncReport, WeightSession, WeightSyncError
from megarl.rollout.api import GenerationError
from megarl.rollout.client.scoring import Scorer
from megarl.rollout.executor import NoSamplesError, WorkflowError
from megarl.rollout.routing import WeightsWanted
from megarl.trainer.canary import Answers, Canary
from megarl.trainer.episode_log import EpisodeLog
from megarl.trainer.inputs import Inputs
from megarl.trainer.logprob_check import LogprobMismatchError, check_equal_logprobs, check_first_logprobs
from megarl.trainer.rank0_rollouts import Rank0Rollouts
from megarl.trainer.shared_gpus import SeparateGpus, ServersInTurn, SharedGpus
from megarl.types import PackedBatch

log = logging.getLogger(__name__)

T = TypeVar("T")


class RolloutDriver:
    """A context manager: rank 0 starts the servers on entry, so that they load while the actor is built.

    `version` is that of the actor's weights on the servers. `outdated` is true after `connect` if the servers hold
    other weights than the actor: then push before the first batch.
    """

    def __init__(self, config: Config, folder: RunFolder, inputs: Inputs, algorithm: Algorithm) -> None:
        self.config = config
        self.folder = folder
        self.inputs = inputs
        self.algorithm = algorithm
        self.is_rank0 = inputs.train is not None
        self.version = 0
        self.outdated = False
        self._actor: Any = None
        self._rank0: Rank0Rollouts | None = None  # on rank 0
        self._session: WeightSession | None = None
        self.note: Callable[[str], None] = lambda line: None  # prints a line above the progress display
        self._transports = ""  # of the last sync
        self._saved: Mapping[str, Any] = {}  # rollout state to continue from
        self._episodes = EpisodeLog(folder, inputs.tokenizer, config.logger.samples_per_step)
        self._plan_hash = ""  # of the plan in sync_plan.json
        self._version_offset = 0  # of the servers' versions to the trainer's steps
        self._canary = Canary(config, inputs)
        self._answers: Answers | None = None  # to the last canary, on rank 0
        self._comparison_due = False
        self._unchecked: int | None = None  # version whose log-probs were not compared yet
        self.gpus: SeparateGpus | SharedGpus = SeparateGpus()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> RolloutDriver:
        if self.is_rank0:
            self._rank0 = Rank0Rollouts(self.config, self.folder, self.inputs, self.algorithm)
            self._open.callback(self._rank0.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def rank0(self) -> Rank0Rollouts:
        """Servers, client and workflows; rank 0 has them, once this is entered."""
        assert self._rank0 is not None, "rank 0's alone, after __enter__"
        return self._rank0

    @property
    def scorer(self) -> Scorer | None:
        """Client of the teacher's servers, on rank 0 of a run that has some."""
        return self._rank0.scorer if self._rank0 is not None else None

    @property
    def session(self) -> WeightSession:
        assert self._session is not None, "connect() makes it"
        return self._session

    def connect(self, actor: Any, version: int, engines: Iterable[Any]) -> None:
        """Waits for the servers and connects the client and the session that pushes the actor's weights.

        A collective. The servers hold the checkpoint that the run began with, `version` 0. `engines` are all that are
        trained: co-located servers take their memory in turn.
        """
        self._actor = actor
        addresses: list[str] = []
        key = ""
        if self.config.server.colocate:
            self.gpus = SharedGpus(engines, self.config.actor.offload_while_sampling)
        self.gpus.for_sampling()
        if self.is_rank0:
            self.rank0.connect(self._saved)
            addresses, key = self.rank0.servers.addresses, self.rank0.servers.api_key
            self.gpus.servers = ServersInTurn(self.rank0.supervisor, key, self.config.reshard.control_deadline_s)
        session = self._session = WeightSession(self.config.reshard, addresses, key)
        self._open.callback(session.close)
        if self.is_rank0:
            session.set_death_probe(self.rank0.supervisor.died)
        # Servers that outlived a trainer may serve a version above its checkpoint's. Versions continue above theirs.
        served = session.served_version()
        self.outdated = bool(served or version or self.config.actor.lora.path)
        self._version_offset = max(0, served + 1 - version) if self.outdated else 0
        self.version = version + self._version_offset
        self._unchecked = self.version
        if not self.outdated:
            session.version = self.version  # a server restarted before the first push is brought this version
        if self.is_rank0:
            self.rank0.engine.set_version(self.version)

    def lost_episodes(self) -> str:
        """One line about the episodes that the environment lost; empty if none, and on other ranks than 0."""
        if not self.is_rank0 or self.rank0.environments is None:
            return ""
        return self.rank0.environments.report()

    def next_batch(self) -> PackedBatch:
        """The packed completions of the next prompts, the same on every rank."""

        def sample() -> PackedBatch:
            engine, prompts = self.rank0.engine, self.inputs.train
            assert prompts is not None, "rank 0 has the data"
            batch = engine.prepare_batch(prompts, self.rank0.workflow, should_accept_fn=self.algorithm.should_accept)
            version = engine.get_version()
            self._episodes.add(engine.episodes, version, step=version - self._version_offset + 1)
            prompts.observe(engine.episodes)
            return batch

        batch = broadcast_batch(self._on_rank0(sample))
        self.gpus.for_training()
        if self._comparison_due:
            self._compare_canary()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The prompts between loader and trainer; {} on other ranks than 0."""
        return self.rank0.engine.state_dict() | self._episodes.state_dict() if self.is_rank0 else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; call it before `connect`. Prompts accounted for since then are sampled again."""
        counts = self._episodes.state_dict().keys()
        self._saved = {key: value for key, value in state.items() if key not in counts}
        if self.is_rank0:
            self._episodes.load_state_dict(state)

    def push(self, version: int) -> None:
        """Brings the actor's weights to the servers as `version`, and proves them equal. A collective."""
        served = version + self._version_offset
        self._sync(served, lambda: self.session.push(self._actor, served))

    def _sync(self, version: int, transfer: Callable[[], SyncReport]) -> None:
        """Runs `transfer`, which brings `version` to the servers that are alive, and asks them for a canary.

        A collective. Restarted servers take part. A server that dies meanwhile is left out; if it was the last one, a
        restarted one is awaited. A server that lives and fails ends the run, or is left out too with
        reshard.on_failure=drop_server.

        Raises:
            LogprobMismatchError: a server does not compute what the trainer does, and is not left out.
        """
        self.gpus.for_sync()
        if self.is_rank0 and self._canary.enabled and not self.config.server.colocate:
            self.rank0.engine.hold(version)
        while True:
            admitted: list[str] = []
            if self.is_rank0:
                with self._attribute_to_dead_servers():
                    admitted, left_out = self.rank0.supervisor.before_sync(self.config.server.ready_timeout_s)
                for address in left_out:
                    self.session.remove(address)
                for address in admitted:
                    self.session.admit(address)
            try:
                report = transfer()
            except WeightSyncError as error:
                if broadcast_json(self.is_rank0 and self._should_retry(error)):
                    continue
                with self._attribute_to_dead_servers():
                    raise
            if self.is_rank0:
                self.rank0.supervisor.after_sync(self.session.healthy)  # no requests to a server that was dropped
                self._record(report, brought_back=len(set(admitted) & set(report.servers)))
            self.version = self._unchecked = version
            self.gpus.for_sampling()
            if self.is_rank0 and self.rank0.engine.get_version() != version:
                self.rank0.engine.set_version(version)  # rollouts start before the canary
            if self._canary.enabled:
                self._ask_canary(report)
            return

    def _ask_canary(self, report: SyncReport) -> None:
        """Asks the servers for their canary and compares it with the trainer's log-probs. A collective.

        Co-located servers have the trainer's memory now: `next_batch` compares when the trainer has it back.
        """
        with stats_tracker.scope("sync"), stats_tracker.record_timing("canary"):
            if self.is_rank0:
                self._answers = self._canary.ask(self.rank0.engine, report.servers, report.version)
        self._comparison_due = True
        if not self.config.server.colocate:
            self._compare_canary()

    def _compare_canary(self) -> None:
        """Leaves out servers whose canary is beyond the bounds, or stops the run. Then answers are handed over."""
        self._comparison_due = False
        with stats_tracker.scope("sync"), stats_tracker.record_timing("canary"):
            wrong = self._canary.compare(self._answers, self._actor, self.version)
            verdict = broadcast_json(self._leave_out(wrong) if self.is_rank0 else None)
        if verdict:
            raise LogprobMismatchError(verdict)

    def _leave_out(self, wrong: Mapping[str, str]) -> str:
        """Leaves out the servers that `wrong` describes. Returns the error that must stop the run instead, else "".

        Co-located servers always stop it: the batch that they have sampled is complete.
        """
        must_stop = self.config.reshard.on_failure == "stop" or self.config.server.colocate
        supervisor = self.rank0.supervisor
        alive = [address for address in wrong if not supervisor.died(address)]  # restarts are the supervisor's
        others = [address for address in self.session.healthy if address not in wrong]
        if alive and (not others or must_stop):
            further = f" (the same holds for {', '.join(alive[1:])})" if alive[1:] else ""
            return wrong[alive[0]] + further
        for address in alive:
            log.error("%s; going on without %s", wrong[address], address)
            self.session.remove(address)
        if alive:
            supervisor.after_sync(self.session.healthy)
        stats_tracker.total(canary_left_out=len(alive))
        self.rank0.engine.release()
        return ""

    def _should_retry(self, error: WeightSyncError) -> bool:
        """True if the last server failed the sync and a restarted one may come."""
        supervisor, drop = self.rank0.supervisor, self.config.reshard.on_failure == "drop_server"
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
                delta_saving=1 - report.bytes / report.dense_bytes,
                servers=len(report.servers),
            )
            stats_tracker.total(servers_brought_back=brought_back)  # restarted, then given all weights, proven

    def _keep_plan(self, report: SyncReport) -> None:
        """Writes `sync_plan.json` when the plan is a new one. Whole tensors are sent without a plan."""
        plan = self.session.plan
        if plan is None or plan.hash == self._plan_hash:
            return
        self._plan_hash = plan.hash
        facts = traffic(plan) | {"transports": report.transports, "servers": list(report.servers)}
        replace_text(self.folder.sync_plan, json.dumps(facts | {"version": report.version}) + "\n")

    def _on_rank0(self, ask: Callable[[], T]) -> T | None:
        """Runs `ask` on rank 0 and returns its result there, None elsewhere. A collective.

        If no server holds the current weights, all ranks push them first.

        Raises:
            NoSamplesError: on every rank.
        """
        if not self.gpus.servers_hold_weights:  # a checkpoint was written since the last sync
            self._sync(self.session.version, lambda: self.session.resync(self._actor))
        while True:
            result, wanted, failure = None, False, ""
            if self.is_rank0:
                try:
                    with self._attribute_to_dead_servers():
                        result = ask()
                except WeightsWanted:
                    wanted = True
                except NoSamplesError as error:
                    failure = str(error)
            wanted, failure = broadcast_json([wanted, failure])
            if failure:
                raise NoSamplesError(failure)
            if not wanted:
                return result
            self._sync(self.session.version, lambda: self.session.resync(self._actor))

    def check_logprobs(self, batch: PackedBatch) -> None:
        """Compares the first tokens sampled after a sync with the trainer's `prox_logp`: a last, independent proof.

        Call it after each update and before the next sync.

        Raises:
            LogprobMismatchError: they differ by more than reshard.max_logprob_diff on average; deterministic=true: any
                token sampled under the trainer's version differs at all.
        """
        if self.config.deterministic:
            same = batch["loss_mask"].bool() & (batch["versions"] == self.version)
            check_equal_logprobs(batch["prox_logp"][same], batch["rollout_logprobs"][same])
        bound = self.config.reshard.max_logprob_diff
        if self._unchecked is None or not bound:
            return
        chosen = batch["loss_mask"].bool() & (batch["versions"] == self._unchecked)
        if chosen.any():
            difference = float((batch["prox_logp"] - batch["rollout_logprobs"])[chosen].abs().double().mean())
            check_first_logprobs(difference, bound, self._unchecked, self.session.healthy)
            self._unchecked = None

    def evaluate(self, step: int) -> dict[str, Any]:
        """Held-out accuracy if it is due after `step`, else {}. Rank 0 measures, the others wait for it."""

        def measure() -> dict[str, Any]:
            evaluator = self.rank0.evaluator
            if not evaluator.is_due(step, self.config.total_train_steps):
                return {}
            with stats_tracker.record_timing("evaluate"):
                result = evaluator.evaluate(self.rank0.engine, step)
            return {"accuracy": result.accuracy, "problems": result.num_problems, "samples": result.num_samples}

        reply: dict[str, Any] = broadcast_json(self._on_rank0(measure))
        return reply

    @contextlib.contextmanager
    def _attribute_to_dead_servers(self) -> Iterator[None]:
        """Replaces an error by the death of a server, with its log, if one has died: that is the cause."""
        try:
            yield
        except (WorkflowError, GenerationError, WeightSyncError, TimeoutError):
            if self.is_rank0:
                self.rank0.supervisor.raise_cause()
            raise
