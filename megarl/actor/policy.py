"""The policy that RL trains: log-probs, advantages and the policy update on the engine.

What the algorithm decides (advantages, loss, its weight) is handed in; see `megarl/algorithms/`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megarl.actor.api import LossFn, LossInput, LossWeightFn
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch


class PolicyAlgorithm(Protocol):
    """What `MegatronPPOActor` asks of an algorithm."""

    n_minibatches: int
    needs_prox_logp: bool

    def advantages(self, batch: PackedBatch) -> Tensor:
        """float32 `[total_tokens]`, token-aligned."""

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a microbatch and its metrics."""

    def loss_weight(self, data: PackedBatch) -> Tensor:
        """The weight of that mean."""


class MegatronPPOActor(MegatronEngine):
    """The engine with the policy methods of AReaL's actor."""

    def __init__(
        self,
        config: EngineConfig,
        algorithm: PolicyAlgorithm,
        parallel: ParallelConfig | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        super().__init__(config, parallel, deterministic=deterministic)
        self.algorithm = algorithm

    def compute_logp(self, batch: PackedBatch) -> Tensor:
        """float32 `[total_tokens]`, token-aligned: log-probs, under the present weights, of the tokens that
        `loss_mask` marks (of all, where the batch has none); 0 elsewhere."""
        self.eval()
        return self.logprobs(batch, trained_only=True)

    def compute_advantages(self, batch: PackedBatch) -> None:
        """Sets `batch["advantages"]`, float32 `[total_tokens]`, zero where `loss_mask` is not set."""
        batch.set_tokens("advantages", self.algorithm.advantages(batch))

    def ppo_update(self, batch: PackedBatch) -> dict[str, float]:
        """Updates the policy on the batch: one optimizer step for each of the algorithm's minibatches.

        Minibatch j of n takes sequences j, j + n, j + 2n, ..., so from all over the batch. Returns the mean of the
        figures of the steps taken (maxima of those named `*_max`) and the number of `skipped_steps`.

        A batch for one minibatch may come without `prox_logp`, which is set then: no weight changes before the
        update's own forward pass is over, so its log-probs are those of the proximal policy.
        """
        algorithm = self.algorithm
        count, weight = algorithm.n_minibatches, algorithm.loss_weight
        if "prox_logp" in batch:
            return update_in_minibatches(self, batch, count, algorithm.loss, weight, "logprobs")
        if count > 1:
            raise ValueError(
                f"the batch has no prox_logp, and algorithm.n_minibatches={count} steps change the policy in between; "
                "set it to compute_logp(batch) before the update"
            )
        present = torch.zeros(batch.total_tokens, device=self.device)

        def loss(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            data.set_tokens("prox_logp", logprobs.detach())
            present.index_add_(0, data["token"], data["prox_logp"])  # which is 0 where no token is trained on
            return algorithm.loss(logprobs, entropy, data)

        tokens = {**batch.tokens, "token": torch.arange(batch.total_tokens)}
        stats = update_in_minibatches(
            self, PackedBatch(batch.cu_seqlens, tokens, batch.sequences), 1, loss, weight, "logprobs"
        )
        batch.set_tokens("prox_logp", self._everywhere(present))
        return stats


def update_in_minibatches(
    engine: MegatronEngine,
    batch: PackedBatch,
    count: int,
    loss: LossFn,
    loss_weight: LossWeightFn,
    loss_input: LossInput,
) -> dict[str, float]:
    """One optimizer step for each of the `count` minibatches; what `ppo_update` is for actor and critic."""
    if batch.num_seqs < count:  # it may be short of some: samples that cannot be trained on are left out
        raise ValueError(f"{batch.num_seqs} sequences are too few for algorithm.n_minibatches={count}")
    engine.train()
    steps = []
    for first in range(count):
        part = batch if count == 1 else batch.select(range(first, batch.num_seqs, count))
        steps.append(engine.train_batch(part, loss, loss_weight, loss_input=loss_input))
    taken = [step for step in steps if not step["skipped_steps"]] or steps
    figures = {key: (max if key.endswith("_max") else _mean)([step[key] for step in taken]) for key in taken[0]}
    return {**figures, "skipped_steps": sum(step["skipped_steps"] for step in steps)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def rollout_mismatch(batch: PackedBatch, version: int) -> dict[str, float]:
    """How far the rollout's log-probs are from the trainer's on the trained tokens, in nats: `mean` and `max` of
    |difference| over the tokens sampled from `version`, the trainer's own weights (left out where there is none), and
    `kl` over all, the mean of exp(d) - 1 - d with d = trainer - rollout (Schulman's k3 estimate of KL)."""
    mask = batch["loss_mask"].bool()
    difference = (batch["prox_logp"] - batch["rollout_logprobs"]).double()
    figures = {"rollout_kl": float((torch.expm1(difference) - difference)[mask].mean()) if mask.any() else 0.0}
    same = mask & (batch["versions"] == version) if "versions" in batch else mask
    if same.any():
        gap = difference[same].abs()
        figures |= {"logprob_diff_mean": float(gap.mean()), "logprob_diff_max": float(gap.max())}
    return figures
