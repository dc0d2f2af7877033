"""Rollouts of a policy on every rank: batches, evaluations, and the check of servers that have new weights.

Rank 0 alone talks to servers, through `Rank0Rollouts`. Every rank has a `RolloutDriver` and calls the same methods.
Rank 0's batches reach the others as packed tensors.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megarl.algorithms import Algorithm
from megarl.config import Config
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.parallel.broadcast import await_rank0, broadcast_batch, broadcast_json
from megarl.reshard.session import SyncReport
from megarl.rollout.client.scoring import Scorer
from megarl.rollout.closing import close_after
from megarl.rollout.executor import NoSamplesError
from megarl.rollout.routing import WeightsWanted
from megarl.trainer.inputs import Inputs
from megarl.trainer.rollouts.canary import Answers, Canary
from megarl.trainer.rollouts.episode_log import EpisodeLog
from megarl.trainer.rollouts.logprob_check import LogprobMismatchError, check_equal_logprobs, check_first_logprobs
from megarl.trainer.rollouts.rank0_rollouts import Rank0Rollouts
from megarl.trainer.rollouts.weight_sync import WeightSync
from megarl.types import PackedBatch

log = logging.getLogger(__name__)

T = TypeVar("T")


class RolloutDriver:
    """A context manager around the rollouts of one policy, on the servers that `weights` keeps at its weights."""

    def __init__(
        self, config: Config, folder: RunFolder, inputs: Inputs, algorithm: Algorithm, weights: WeightSync
    ) -> None:
        self.config = config
        self.folder = folder
        self.inputs = inputs
        self.algorithm = algorithm
        self.is_rank0 = inputs.train is not None
        self.weights = weights
        self._actor: Any = None
        self._rank0: Rank0Rollouts | None = None  # on rank 0
        self._before_batch: dict[str, Any] | None = None  # state, while the last batch is not trained on
        self._saved: Mapping[str, Any] | None = None  # rollout state to continue from
        self._episodes = EpisodeLog(folder, inputs.tokenizer, config.logger.samples_per_step)
        self._version_offset = 0  # servers' version minus trainer's step
        self._canary = Canary(config, inputs)
        self._answers: Answers | None = None  # to the last canary, on rank 0
        self._comparison_due = False
        self._unchecked: int | None = None  # version whose log-probs were not compared yet
        self._open = contextlib.ExitStack()

    def __enter__(self) -> RolloutDriver:
        if self.is_rank0:
            self._rank0 = Rank0Rollouts(self.config, self.folder, self.inputs, self.algorithm)
            self._open.callback(self._rank0.close)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after(error, self._open.close)

    @property
    def rank0(self) -> Rank0Rollouts:
        """Client and workflows; rank 0 has them, once this is entered."""
        assert self._rank0 is not None, "rank 0's alone, after __enter__"
        return self._rank0

    @property
    def scorer(self) -> Scorer | None:
        """Client of the teacher's servers, on rank 0 of a run that has some."""
        return self._rank0.scorer if self._rank0 is not None else None

    @property
    def version(self) -> int:
        """Version of the actor's weights on the servers."""
        return self.weights.version

    def connect(self, actor: Any, step: int) -> None:
        """Connects the client to the servers, and follows their versions. `actor` has taken `step` steps.

        Call it after the weights' own `connect`.
        """
        self._actor = actor
        if self.is_rank0:
            if self._saved is None:  # a job that begins anew in its folder
                self._episodes.begin()
            self.rank0.connect(self.weights.rank0, self._saved or {})
            self.rank0.engine.set_version(self.version)
        self._version_offset = self.version - step
        self._unchecked = self.version
        self.weights.follow(self)

    def lost_episodes(self) -> str:
        """One line about the episodes that the environment lost; empty if none, and on other ranks than 0."""
        if not self.is_rank0 or self.rank0.environments is None:
            return ""
        return self.rank0.environments.report()

    def next_batch(self) -> PackedBatch:
        """The packed completions of the next prompts, the same on every rank.

        Until `taken`, `state_dict` is as before this batch if a teacher may still be lost that has to score it.
        """
        before = copy.deepcopy(self.state_dict()) if self.config.teacher.source == "server" else None

        def sample() -> PackedBatch:
            engine, prompts = self.rank0.engine, self.inputs.train
            assert prompts is not None, "rank 0 has the data"
            batch = engine.prepare_batch(prompts, self.rank0.workflow, should_accept_fn=self.algorithm.should_accept)
            version = engine.get_version()
            self._episodes.add(engine.episodes, version, step=version - self._version_offset + 1)
            prompts.observe(engine.episodes)
            return batch

        batch = broadcast_batch(self._on_rank0(sample))
        self._before_batch = before
        self.weights.gpus.for_training()
        if self._comparison_due:
            self._compare_canary()
        return batch

    def taken(self) -> None:
        """Tells that the last batch is trained on."""
        self._before_batch = None

    def state_dict(self) -> dict[str, Any]:
        """The prompts between loader and trainer; {} on other ranks than 0."""
        if self._before_batch is not None:
            return self._before_batch
        return self.rank0.engine.state_dict() | self._episodes.state_dict() if self.is_rank0 else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; call it before `connect`. Prompts accounted for since then are sampled again."""
        counts = self._episodes.state_dict().keys()
        self._saved = {key: value for key, value in state.items() if key not in counts}
        if self.is_rank0:
            self._episodes.load_state_dict(state)

    def push(self, version: int) -> None:
        """Brings the actor's weights of step `version` to the servers, and proves them equal. A collective."""
        self.weights.push(version + self._version_offset)

    def begin_push(self, version: int) -> None:
        """Begins a `push` beside what follows. Batches are taken at the new version from now on. A collective.

        Until `end_push` the actor's weights must not change. `next_batch` and `evaluate` end it where they must wait.
        """
        served = version + self._version_offset
        self.weights.begin_push(served)
        if self.is_rank0:
            self.rank0.engine.expect_version(served, self.weights.has_transferred)

    def end_push(self) -> None:
        """Ends the push that was begun, if there is one. A collective. Raises what `push` does."""
        self.weights.end_push()

    def before_sync(self, version: int) -> None:
        """Withholds answers of `version` until the canary is judged."""
        if self.is_rank0 and self._canary.enabled and not self.config.server.colocate:
            self.rank0.engine.hold(version)

    def after_sync(self, report: SyncReport) -> None:
        """Samples under the new version, and asks the servers for a canary. A collective.

        Raises:
            LogprobMismatchError: a server does not compute what the trainer does, and is not left out.
        """
        self._unchecked = report.version
        if self.is_rank0:
            self.rank0.engine.set_version(report.version)  # rollouts start before the canary
        if self._canary.enabled:
            self._ask_canary(report)

    def _ask_canary(self, report: SyncReport) -> None:
        """Asks the servers for their canary and compares it with the trainer's log-probs. A collective.

        Co-located servers have the trainer's memory now: `next_batch` compares when the trainer has it back.
        """
        with stats_tracker.scope("sync"), stats_tracker.record_timing("canary"):
            if self.is_rank0:
                healthy = self.weights.session.healthy  # another policy's canary may have left some out
                servers = [address for address in report.servers if address in healthy]
                self._answers = self._canary.ask(self.rank0.engine, servers, report.version)
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
        supervisor = self.weights.rank0.supervisor
        alive = [address for address in wrong if not supervisor.died(address)]  # restarts are the supervisor's
        others = [address for address in self.weights.session.healthy if address not in wrong]
        if alive and (not others or must_stop):
            further = f" (the same holds for {', '.join(alive[1:])})" if alive[1:] else ""
            return wrong[alive[0]] + further
        for address in alive:
            log.error("%s; going on without %s", wrong[address], address)
        if alive:
            self.weights.leave_out(alive)
        stats_tracker.total(canary_left_out=len(alive))
        self.rank0.engine.release()
        return ""

    def _on_rank0(self, ask: Callable[[], T]) -> T | None:
        """Runs `ask` on rank 0 and returns its result there, None elsewhere. A collective.

        If no server holds the current weights, all ranks push them first, or end the push that is under way.

        Raises:
            NoSamplesError: on every rank.
        """
        if not self.weights.gpus.servers_hold_weights:  # a checkpoint was written since the last sync
            self.weights.resync()
        while True:
            result, wanted, failure = None, False, ""
            if self.is_rank0:
                try:
                    with self.weights.attributed_to_dead_servers():
                        result = ask()
                except WeightsWanted:
                    wanted = True
                except NoSamplesError as error:
                    failure = str(error)
            await_rank0(self.config.parallel.timeout_s)
            wanted, failure = broadcast_json([wanted, failure])
            if failure:
                raise NoSamplesError(failure)
            if not wanted:
                return result
            if self.weights.is_pushing:
                self.weights.end_push()
            else:
                self.weights.resync()

    def check_logprobs(self, batch: PackedBatch) -> None:
        """Compares the first tokens sampled after a sync with the trainer's `prox_logp`: a last, independent proof.

        Call it after each update and before the next sync.

        Raises:
            LogprobMismatchError: they differ by more than reshard.max_logprob_diff on average; deterministic=true on
                CPU: any token sampled under the trainer's version differs at all.
        """
        if self.config.determinism.same_bits:
            same = batch["loss_mask"].bool() & (batch["versions"] == self.version)
            check_equal_logprobs(batch["prox_logp"][same], batch["rollout_logprobs"][same])
        bound = self.config.reshard.max_logprob_diff
        if self._unchecked is None or not bound:
            return
        chosen = batch["loss_mask"].bool() & (batch["versions"] == self._unchecked)
        if chosen.any():
            difference = float((batch["prox_logp"] - batch["rollout_logprobs"])[chosen].abs().double().mean())
            check_first_logprobs(difference, bound, self._unchecked, self.weights.session.healthy)
            self._unchecked = None

    def evaluate(self, step: int) -> dict[str, Any]:
        """Held-out accuracy if it is due after `step`, else {}. Rank 0 measures, the others wait for it."""

        def measure() -> dict[str, Any]:
            evaluator = self.rank0.evaluator
            if not evaluator.is_due(step, self.config.total_train_steps):
                return {}
            if self.weights.is_pushing:
                raise WeightsWanted("the evaluation is of the new weights")
            with stats_tracker.record_timing("evaluate"):
                result = evaluator.evaluate(self.rank0.engine, step)
            return {"accuracy": result.accuracy, "problems": result.num_problems, "samples": result.num_samples}

        reply: dict[str, Any] = broadcast_json(self._on_rank0(measure))
        return reply
