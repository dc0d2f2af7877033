"""The rollout side of a run: servers, prompts, workflow, evaluation and weight syncs, all owned by rank 0.

Every rank has a `Rollouts` and calls the same methods; what rank 0 samples reaches the others as packed tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megarl.actor.families import local_folder
from megarl.config import Config
from megarl.observe.metrics import stats_tracker
from megarl.observe.run_folder import RunFolder
from megarl.parallel.broadcast import broadcast_batch, broadcast_json
from megarl.reshard.session import WeightSession, WeightSyncError
from megarl.reshard.sglang import WEIGHT_LOADER
from megarl.reshard.verify import check_first_logprobs
from megarl.rewards.gsm8k import gsm8k_reward_fn
from megarl.rollout.evaluate import Evaluator
from megarl.rollout.executor import WorkflowError
from megarl.rollout.sglang_client import RemoteSGLangEngine
from megarl.rollout.sglang_server import SGLangServers
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.trainer.read import Inputs
from megarl.types import PackedBatch


class Rollouts:
    """Rank 0 starts the servers when this is entered, so that they load while the actor is built."""

    def __init__(self, config: Config, folder: RunFolder, inputs: Inputs) -> None:
        self.config = config
        self.folder = folder
        self.inputs = inputs
        self.chief = inputs.train is not None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Rollouts:
        if self.chief:
            config = self.config
            model = local_folder(config.actor.path)
            self._servers = SGLangServers(config.server, model, self.folder.logs, WEIGHT_LOADER, config.sglang)
            self._open.callback(self._servers.stop)
            try:
                self._servers.start()
            except BaseException:
                self._open.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def connect(self, version: int) -> None:
        """Waits for the servers and connects the client and the weight session. A collective."""
        addresses: list[str] = []
        key = ""
        if self.chief:
            self._servers.wait_ready()
            addresses, key = self._servers.addresses, self._servers.api_key
            self._engine = RemoteSGLangEngine(self.config.rollout)
            self._engine.initialize(addresses, api_key=key)
            self._open.callback(self._engine.destroy)
            tokenizer, gconfig = self.inputs.tokenizer, self.config.gconfig
            self._workflow = RLVRWorkflow(gsm8k_reward_fn, gconfig, tokenizer)
            self._evaluator = Evaluator(
                self.config.evaluator,
                RLVRWorkflow(gsm8k_reward_fn, self.config.evaluator.sampling(gconfig), tokenizer),
                self.inputs.valid,
                tokenizer,
                self.folder.path / "evaluations",
            )
        self._weights = WeightSession(self.config.reshard, addresses, key)
        self._open.callback(self._weights.close)
        # Servers that outlived a trainer may serve a version above its checkpoint's: versions go on above theirs.
        self._ahead = max(0, self._weights.served_version() + 1 - max(version, 1))
        self._unchecked: int | None = version + self._ahead
        if self.chief:
            self._engine.set_version(version + self._ahead)

    def next_batch(self) -> PackedBatch:
        """The packed completions of the next prompts, the same on every rank."""
        batch = None
        if self.chief:
            assert self.inputs.train is not None
            with self._blaming_dead_servers():
                batch = self._engine.rollout_batch(next(self.inputs.train), self._workflow)
        return broadcast_batch(batch)

    def push(self, actor: Any, version: int) -> None:
        """Brings the servers to the actor's weights, proven equal, as `version`. A collective."""
        with self._blaming_dead_servers():
            report = self._weights.push(actor, version + self._ahead)
        self._unchecked = report.version
        if self.chief:
            self._engine.set_version(report.version)
            self._engine.addresses = self._weights.healthy  # no requests to a server that was dropped
            with stats_tracker.scope("sync"):
                stats_tracker.scalar(
                    verified=float(report.verified > 0),
                    pieces=report.verified,
                    mbytes=report.bytes / 1e6,
                    delta_saving=1 - report.bytes / report.dense_bytes,
                    servers=len(report.servers),
                )

    def check_logprobs(self, batch: PackedBatch) -> None:
        """Holds the first tokens sampled after a sync to the trainer's `prox_logp` of them: a last, independent proof.

        Raises:
            LogprobMismatchError: they differ by more than reshard.max_logprob_diff on average.
        """
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
        found: dict[str, Any] = {}
        if self.chief and self._evaluator.is_due(step, self.config.total_train_steps):
            with stats_tracker.record_timing("evaluate"), self._blaming_dead_servers():
                result = self._evaluator.evaluate(self._engine, step)
            found = {"accuracy": result.accuracy, "problems": result.num_problems, "samples": result.num_samples}
        reply: dict[str, Any] = broadcast_json(found)
        return reply

    @contextlib.contextmanager
    def _blaming_dead_servers(self) -> Iterator[None]:
        """Where a server has died, its log is the cause, and not the request that met nobody."""
        try:
            yield
        except (WorkflowError, WeightSyncError, TimeoutError):
            if self.chief:
                self._servers.check_alive()
            raise
