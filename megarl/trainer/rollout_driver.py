"""The rollout side of a run: servers, prompts, workflow, evaluation and weight syncs, all owned by rank 0.

Every rank has a `RolloutDriver` and calls the same methods; what rank 0 samples reaches the others as packed tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from megarl.algorithms import Algorithm
from megarl.config import Config
from megarl.families import local_folder
from megarl.knobs import UserError, function_of
from megarl.observe.logger import keep_lines
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.parallel.broadcast import broadcast_batch, broadcast_json
from megarl.parallel.rendezvous import job_folder
from megarl.reshard.session import SyncReport, WeightSession, WeightSyncError
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.reshard.transfer.digests import check_equal_logprobs, check_first_logprobs
from megarl.rewards import reward_fn_of
from megarl.rewards.answers import answer_of
from megarl.rewards.pool import RewardPool
from megarl.rollout.api import GenerationError, RolloutWorkflow
from megarl.rollout.client.sglang_client import KEY_VARIABLE, RemoteSGLangEngine, addresses_in_environment
from megarl.rollout.evaluate import Evaluator
from megarl.rollout.executor import WorkflowError
from megarl.rollout.routing import WeightsWanted
from megarl.rollout.servers.external import ExternalServers, JobServers
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.rollout.servers.supervisor import Supervisor
from megarl.rollout.workflows.remax import ReMaxRLVRWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.rollout.workflows.rollout_func import RolloutFuncWorkflow
from megarl.trainer.inputs import Inputs
from megarl.types import Episode, GenerationHyperparameters, PackedBatch

T = TypeVar("T")

WORKFLOWS: dict[str, Any] = {"rlvr": RLVRWorkflow, "remax": ReMaxRLVRWorkflow}  # by `Algorithm.workflow`


def workflow_of(
    name: str, function: Callable[..., Any] | None, rewards: Any, gconfig: GenerationHyperparameters, tokenizer: Any
) -> RolloutWorkflow:
    """How prompts are sampled: by the user's `rollout.rollout_func` where there is one, else as the algorithm asks."""
    if function is not None:
        return RolloutFuncWorkflow(function, rewards, gconfig, tokenizer)
    workflow: RolloutWorkflow = WORKFLOWS[name](rewards, gconfig, tokenizer)
    return workflow


class RolloutDriver:
    """Rank 0 starts the servers when this is entered, so that they load while the actor is built."""

    def __init__(self, config: Config, folder: RunFolder, inputs: Inputs, algorithm: Algorithm) -> None:
        self.config = config
        self.algorithm = algorithm
        self._saved: Mapping[str, Any] = {}  # the state to go on from
        self._accounted = 0  # lines of episodes.jsonl
        self.folder = folder
        self.inputs = inputs
        self.chief = inputs.train is not None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> RolloutDriver:
        if self.chief:
            config = self.config
            functions = [reward_fn_of(name) for name in config.rewards.functions]
            name = config.rollout.rollout_func
            self._function = function_of(name, f"rollout.rollout_func={name}") if name else None
            self._rewards = self._open.enter_context(RewardPool(functions, config.rewards))
            self._servers: SGLangServers | ExternalServers
            key = os.environ.get(KEY_VARIABLE, "")
            addresses = addresses_in_environment()
            if config.deterministic and (addresses or job_folder() is not None):
                raise UserError(
                    "deterministic=true needs servers that this run starts on this machine: set it to false, or leave "
                    "out servers that run elsewhere"
                )
            if addresses:
                self._servers = ExternalServers(addresses, key, WEIGHT_LOADER)
            elif (job := job_folder()) is not None:
                server = config.server
                self._servers = JobServers(job, server.n_servers, key, WEIGHT_LOADER, server.ready_timeout_s)
            else:
                model = local_folder(config.actor.path)
                self._servers = SGLangServers(
                    config.server, model, self.folder.logs, WEIGHT_LOADER, config.sglang, config.deterministic
                )
            self._open.callback(self._servers.stop)
            try:
                self._servers.start()
            except BaseException:
                self._open.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def connect(self, actor: Any, version: int) -> None:
        """Waits for the servers and connects the client and the session that brings them the actor's weights.

        A collective. The servers hold the checkpoint that the run began with, `version` 0.
        """
        self._actor = actor
        addresses: list[str] = []
        key = ""
        if self.chief:
            self._servers.wait_ready()
            server = self.config.server
            self._supervisor = Supervisor(self._servers.servers, server.heartbeat_s, server.max_restarts)
            addresses, key = self._servers.addresses, self._servers.api_key
            self._engine = RemoteSGLangEngine(self.config.rollout)
            self._engine.initialize(addresses, api_key=key)
            self._open.callback(self._engine.destroy)
            self._engine.follow(self._supervisor)
            self._supervisor.on_change = self._engine.refresh
            self._supervisor.start()
            self._open.callback(self._supervisor.close)
            self._engine.vocab_size = self.inputs.model.vocab_size
            self._engine.load_state_dict(self._saved)
            tokenizer, gconfig = self.inputs.tokenizer, self.config.gconfig
            self._workflow = workflow_of(self.algorithm.workflow, self._function, self._rewards, gconfig, tokenizer)
            self._evaluator = Evaluator(
                self.config.evaluator,
                workflow_of("rlvr", self._function, self._rewards, self.config.evaluator.sampling(gconfig), tokenizer),
                self.inputs.valid,
                tokenizer,
                self.folder.path / "evaluations",
                answer_of,
            )
        self._weights = WeightSession(self.config.reshard, addresses, key)
        self._open.callback(self._weights.close)
        if self.chief:
            self._weights.forgive(self._supervisor.died)
        # Servers that outlived a trainer may serve a version above its checkpoint's: versions go on above theirs.
        served = self._weights.served_version()
        self._ahead = max(0, served + 1 - version) if served or version else 0
        self.version = version + self._ahead
        self.outdated = bool(served or version)  # the servers hold other weights than the actor: a push comes first
        self._unchecked: int | None = self.version
        if not self.outdated:
            self._weights.version = self.version  # what a restarted server is brought before the first push
        if self.chief:
            self._engine.set_version(version + self._ahead)

    def next_batch(self) -> PackedBatch:
        """The packed completions of the next prompts, the same on every rank."""

        def sample() -> PackedBatch:
            batch = self._engine.prepare_batch(
                self.inputs.train, self._workflow, should_accept_fn=self.algorithm.should_accept
            )
            self._account(self._engine.episodes)
            return batch

        return broadcast_batch(self._served(sample))

    def _account(self, episodes: Sequence[Episode]) -> None:
        """One line a prompt in episodes.jsonl: what it gave, or why it is not trained on."""
        with (self.folder.path / "episodes.jsonl").open("a") as file:
            for episode in episodes:
                line: dict[str, Any] = {"prompt_id": episode.prompt_id, "version": self._engine.get_version()}
                if episode.group is None:
                    line["rejected"] = episode.reason
                else:
                    line["samples"] = episode.group.num_seqs
                    line["rewards"] = [round(reward, 6) for reward in episode.group["rewards"].tolist()]
                if episode.dropped:
                    line["dropped"] = episode.dropped
                file.write(json.dumps(line) + "\n")
        self._accounted += len(episodes)

    def state_dict(self) -> dict[str, Any]:
        """The prompts between loader and trainer; rank 0 has them."""
        return self._engine.state_dict() | {"accounted": self._accounted} if self.chief else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken; before `connect`. What was accounted for since then is done again."""
        self._saved = {key: value for key, value in state.items() if key != "accounted"}
        if self.chief:
            self._accounted = state["accounted"]
            keep_lines(self.folder.path / "episodes.jsonl", self._accounted)

    def push(self, version: int) -> None:
        """Brings the servers to the actor's weights, proven equal, as `version`. A collective."""
        report = self._sync(lambda: self._weights.push(self._actor, version + self._ahead))
        if self.chief:
            self._engine.set_version(report.version)

    def _sync(self, bring: Callable[[], SyncReport]) -> SyncReport:
        """Has `bring` bring the weights to the servers that are there: restarted ones too, dead ones not. A collective.

        A server that dies meanwhile is left out, and where it was the last, a restarted one is waited for. One that
        lives and fails ends the run, or with reshard.on_failure=drop_server is treated alike.
        """
        while True:
            admitted: list[str] = []
            if self.chief:
                with self._blaming_dead_servers():
                    admitted, left_out = self._supervisor.before_sync(self.config.server.ready_timeout_s)
                for address in left_out:
                    self._weights.remove(address)
                for address in admitted:
                    self._weights.admit(address)
            try:
                report = bring()
            except WeightSyncError as error:
                if broadcast_json(self.chief and self._another_sync(error)):
                    continue
                with self._blaming_dead_servers():
                    raise
            if self.chief:
                self._supervisor.after_sync(self._weights.healthy)  # no requests to a server that was dropped
                self._record(report, brought_back=len(set(admitted) & set(report.servers)))
            self.version = self._unchecked = report.version
            return report

    def _another_sync(self, error: WeightSyncError) -> bool:
        """Whether a sync that failed at the last server is worth another, with a server that is started again."""
        drop = self.config.reshard.on_failure == "drop_server"
        if not error.server or not (drop or self._supervisor.died(error.server)):
            return False
        self._supervisor.after_sync([])
        return self._supervisor.outlook() != "none"

    def _record(self, report: SyncReport, brought_back: int) -> None:
        with stats_tracker.scope("sync"):
            stats_tracker.scalar(
                verified=float(report.verified > 0),
                pieces=report.verified,
                mbytes=report.bytes / 1e6,
                delta_saving=1 - report.bytes / report.dense_bytes,
                servers=len(report.servers),
            )
            stats_tracker.total(servers_brought_back=brought_back)  # restarted: they were given all weights, proven

    def _served(self, ask: Callable[[], T]) -> T | None:
        """What rank 0 gets of `ask`, others None; where no server has the weights, they are brought. A collective."""
        while True:
            found, wanted = None, False
            if self.chief:
                with self._blaming_dead_servers():
                    try:
                        found = ask()
                    except WeightsWanted:
                        wanted = True
            if not broadcast_json(wanted):
                return found
            self._sync(lambda: self._weights.resync(self._actor))

    def check_logprobs(self, batch: PackedBatch) -> None:
        """Holds the first tokens sampled after a sync to the trainer's `prox_logp` of them: a last, independent proof,
        asked for after each update and before the next sync.

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
            check_first_logprobs(difference, bound, self._unchecked, self._weights.healthy)
            self._unchecked = None

    def evaluate(self, step: int) -> dict[str, Any]:
        """Held-out accuracy when it is due after `step`, else nothing. Rank 0 measures, the others wait for it."""

        def measure() -> dict[str, Any]:
            if not self._evaluator.is_due(step, self.config.total_train_steps):
                return {}
            with stats_tracker.record_timing("evaluate"):
                result = self._evaluator.evaluate(self._engine, step)
            return {"accuracy": result.accuracy, "problems": result.num_problems, "samples": result.num_samples}

        reply: dict[str, Any] = broadcast_json(self._served(measure))
        return reply

    @contextlib.contextmanager
    def _blaming_dead_servers(self) -> Iterator[None]:
        """Where a server has died, its log is the cause, and not the request that met nobody."""
        try:
            yield
        except (WorkflowError, GenerationError, WeightSyncError, TimeoutError):
            if self.chief:
                self._supervisor.blame()
            raise
