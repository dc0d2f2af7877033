"""The policy of an RL run: log-probs, advantages and the policy update on the engine.

Advantages, loss and loss weight come from the algorithm; see `megarl/algorithms/`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.actor.api import FinetuneSpec, LossFn, LossInput, LossWeightFn
from megarl.actor.batch import rank_batches
from megarl.actor.batch.microbatch import Microbatch
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model.routing import RoutingReplay, replaying
from megarl.actor.token_loss import TokenLoss
from megarl.families import decoder
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import OFF, Determinism
from megarl.types import ROUTED_EXPERTS, Metrics, PackedBatch, trained_tokens_of_samples


class PolicyAlgorithm(Protocol):
    """Attributes and methods of an algorithm that `MegatronPPOActor` uses."""

    n_minibatches: int
    needs_prox_logp: bool
    routing_replay: str

    def advantages(self, batch: PackedBatch) -> Tensor:
        """Computes advantages, float32 `[total_tokens]`, token-aligned."""

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, Metrics]:
        """Computes the mean loss of a microbatch and its metrics."""

    def loss_weight(self, data: PackedBatch) -> Tensor:
        """Weight of the microbatch's mean loss."""

    def by_token(self, given_prox_logp: bool) -> bool:
        """True if the loss's gradient at a token depends on no other token's log-prob or entropy."""


class MegatronPPOActor(MegatronEngine):
    """The engine with the policy methods of AReaL's actor."""

    loss_input: LossInput = "logprobs"  # with a teacher, a `distillation.Distillation`

    def __init__(
        self,
        config: EngineConfig,
        algorithm: PolicyAlgorithm,
        parallel: ParallelConfig | None = None,
        *,
        trainable: bool = True,
        deterministic: Determinism = OFF,
    ) -> None:
        super().__init__(config, parallel, trainable=trainable, deterministic=deterministic)
        self.algorithm = algorithm
        if algorithm.routing_replay != "off":
            self.backend = replaying(self.backend)
        self._around_passes: Callable[[], AbstractContextManager[None]] = nullcontext

    def initialize(
        self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, base: MegatronEngine | None = None
    ) -> None:
        super().initialize(addr, ft_spec, base)
        if self.algorithm.routing_replay != "off":
            modules, how = self.backend.recompute_modules, self.config.recompute
            recomputes = how == "full" or (how == "selective" and "moe" in modules)
            self._replay = RoutingReplay(self.stages, decoder(self.hf_config), self.groups, recomputes)

    def run_passes_in(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Has every pass through the model run in a context, which may change the weights until the pass ends."""
        self._around_passes = context

    def _run(self, microbatches: list[Microbatch], process: Callable[..., Any], forward_only: bool) -> list[Any]:
        with self._around_passes():
            return super()._run(microbatches, process, forward_only)

    def compute_logp(self, batch: PackedBatch) -> Tensor:
        """Computes log-probs under the current weights, float32 `[total_tokens]`, token-aligned.

        Tokens outside `loss_mask` are 0. Without a `loss_mask`, all tokens are computed. With
        `algorithm.routing_replay=rollout` routers take the batch's `routed_experts`; with `proximal` this sets them.
        """
        self.eval()
        if self.algorithm.routing_replay == "proximal":
            assert self._replay is not None, "initialize first"
            batch.tokens.pop(ROUTED_EXPERTS, None)
            with self._replay.recording(batch):
                return self.logprobs(batch, trained_only=True)
        self._check_routes(batch)
        return self.logprobs(batch, trained_only=True)

    def _check_routes(self, batch: PackedBatch) -> None:
        if self._replay is not None:
            self._replay.check(batch)

    def compute_advantages(self, batch: PackedBatch) -> None:
        """Sets `batch["advantages"]`, float32 `[total_tokens]`, zero outside `loss_mask`.

        If the batch has `sample_ids`, also sets `sample_tokens` `[num_seqs]`: trained tokens of the sequence's sample.
        """
        batch.set_tokens("advantages", self.algorithm.advantages(batch))
        if "sample_ids" in batch:
            batch.set_sequences("sample_tokens", trained_tokens_of_samples(batch)[batch.samples])

    def ppo_update(self, batch: PackedBatch) -> dict[str, float]:
        """Takes `algorithm.n_minibatches` optimizer steps, each on another part of the batch.

        Minibatch j of n has samples j, j + n, j + 2n, ..., which spread over the batch. Returns the mean of the steps'
        metrics (maxima for `*_max`) without skipped steps, and the number of `skipped_steps`.

        With one minibatch, the batch may lack `prox_logp`. The update then sets it from its own forward pass: no weight
        changes before that pass ends, so its log-probs belong to the proximal policy.

        Raises:
            ValueError: several minibatches without `prox_logp`, or fewer samples than minibatches.
            UserError: with `algorithm.routing_replay`, a sequence without routes.
        """
        self._check_routes(batch)
        stats = self._update(batch)
        if self._replay is not None:
            stats["routes_changed"] = self._replay.changed_share()
        return stats

    def _update(self, batch: PackedBatch) -> dict[str, float]:
        algorithm = self.algorithm
        count, weight = algorithm.n_minibatches, algorithm.loss_weight
        if "prox_logp" in batch:
            source = self._loss_input(algorithm.loss, given_prox_logp=True)
            return update_in_minibatches(self, batch, count, algorithm.loss, weight, source)
        if count > 1:
            raise ValueError(
                f"the batch has no prox_logp, and algorithm.n_minibatches={count} steps change the policy in between; "
                "set it to compute_logp(batch) before the update"
            )
        joined, local = rank_batches.join(batch, self.groups)
        current_logprobs = torch.zeros(joined.total_tokens, device=self.device)

        def own_loss(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, Metrics]:
            data.set_tokens("prox_logp", logprobs.detach())
            return algorithm.loss(logprobs, entropy, data)

        def loss(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, Metrics]:
            result = own_loss(logprobs, entropy, data)
            # 0 at positions without a trained token, including sequence ends, whose token index is 0.
            current_logprobs.index_add_(0, data["token"], data["prox_logp"])
            return result

        numbered = PackedBatch(
            joined.cu_seqlens, {**joined.tokens, "token": torch.arange(joined.total_tokens)}, joined.sequences
        )
        numbered.shared = True  # every rank has this one now
        source = self._loss_input(own_loss, given_prox_logp=False)
        stats = update_in_minibatches(self, numbered, 1, loss, weight, source)
        rows = joined.split(rank_batches.rows_on_all_ranks(current_logprobs, self.groups))
        batch.set_tokens("prox_logp", torch.cat(rows[local]))
        return stats

    def _loss_input(self, loss: LossFn, given_prox_logp: bool) -> LossInput:
        """Returns what computes the log-probs of a loss: by chunks of tokens where the algorithm allows it.

        `loss` may change nothing but its microbatch.
        """
        if self.loss_input == "logprobs" and self.algorithm.by_token(given_prox_logp):
            return TokenLoss(self, loss)
        return self.loss_input


def update_in_minibatches(
    engine: MegatronEngine,
    batch: PackedBatch,
    count: int,
    loss: LossFn,
    loss_weight: LossWeightFn,
    loss_input: LossInput,
) -> dict[str, float]:
    """Takes one optimizer step per minibatch, for `ppo_update` of actor and critic.

    Returns the mean of the steps' metrics (maxima for `*_max`) without skipped steps, and the number of
    `skipped_steps`.

    Raises:
        ValueError: fewer samples than minibatches.
    """
    if batch.num_samples < count:  # possible because samples that cannot be trained on are dropped
        raise ValueError(f"{batch.num_samples} samples are too few for algorithm.n_minibatches={count}")
    samples = batch.samples
    engine.train()
    steps = []
    for first in range(count):
        part = batch if count == 1 else batch.select((samples % count == first).nonzero().squeeze(1).tolist())
        part.shared = batch.shared  # every rank selects the same sequences
        steps.append(engine.train_batch(part, loss, loss_weight, loss_input=loss_input))
    taken = [step for step in steps if not step["skipped_steps"]] or steps
    metrics = {key: (max if key.endswith("_max") else _mean)([step[key] for step in taken]) for key in taken[0]}
    return {**metrics, "skipped_steps": sum(step["skipped_steps"] for step in steps)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
