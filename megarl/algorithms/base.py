"""Interface of RL algorithms: the advantage of every token, the loss, and the weight of each microbatch's loss.

Most algorithms differ in their advantages and in a few settings of one objective, `ops.loss.policy_loss`. They derive
from `PolicyGradient` (`policy_gradient.py`) and fill in both. `GroupRelative` adds GRPO's advantages. An algorithm with
another objective derives from `Algorithm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megarl.algorithms.correction import LEVELS
from megarl.algorithms.kl_penalty import KL_ESTIMATORS
from megarl.knobs import MAX_COUNT, MAX_WEIGHT, UserError, check_ranges, knob
from megarl.ops.loss import CORRECTIONS
from megarl.types import Metrics, PackedBatch

AGGREGATIONS = ("token", "sequence", "constant")
KL_PLACES = ("loss", "reward")
ROUTING_REPLAY = ("off", "rollout", "proximal")
UNBOUNDED = 1e9  # a clip bound that never applies: ratios are clamped below e^20


@dataclass(frozen=True)
class AlgorithmConfig:
    """Base of all algorithm configs."""

    def check(self) -> None:
        """Refuses values that no run could use. Derived classes add rules between knobs.

        Raises:
            UserError: with the name of the knob.
        """
        check_ranges(self, "algorithm")


@dataclass(frozen=True)
class RLConfig(AlgorithmConfig):
    """Knobs of every RL algorithm."""

    n_minibatches: int = knob(
        1,
        "optimizer steps on each rollout batch; each step takes a different part of the batch",
        least=1,
        most=MAX_COUNT,
    )
    aggregate: str = knob(
        "token",
        "mean of the loss: token (all tokens), sequence (each sequence first) or constant (aggregate_tokens)",
        choices=AGGREGATIONS,
    )
    aggregate_tokens: int = knob(
        0, "aggregate=constant: each sequence's summed loss is divided by this many tokens", least=0, most=MAX_COUNT
    )
    entropy_coef: float = knob(0.0, "weight of an entropy bonus", least=0, most=MAX_WEIGHT)
    kl_coef: float = knob(
        0.0, "weight of the KL to the reference policy; above 0 loads a frozen reference", least=0, most=MAX_WEIGHT
    )
    kl_in: str = knob("loss", "where the KL to the reference is applied: loss or reward", choices=KL_PLACES)
    kl_estimator: str = knob(
        "k3", "estimator of the KL to the reference: k1, k2 or k3 (Schulman)", choices=KL_ESTIMATORS
    )
    correction: str = knob(
        "none",
        "weight each token by trainer/rollout probability: none, truncate (TIS) or mask (IcePop)",
        choices=CORRECTIONS,
    )
    correction_low: float = knob(0.5, "mask: tokens with a smaller weight are left out", least=0, most=UNBOUNDED)
    correction_high: float = knob(
        2.0, "truncate: the largest weight; mask: tokens with a larger weight are left out", above=0, most=UNBOUNDED
    )
    correction_level: str = knob(
        "token",
        "whose probability the weight is of: token, sequence (product of its tokens) or geometric (their mean)",
        choices=LEVELS,
    )
    correction_veto: float = knob(
        0.0, "sequences with a token of a smaller trainer/rollout probability are left out; 0 is off", least=0, below=1
    )
    routing_replay: str = knob(
        "off",
        "experts of the policy's log-probs and update: off (its own routers choose), rollout (the servers' choice, R3) "
        "or proximal (the choice of the pass before the update, R2)",
        choices=ROUTING_REPLAY,
    )
    reject_low: float = knob(
        0.0, "sequences with a smaller geometric mean of trainer/rollout probability are left out", least=0, below=1
    )
    reject_high: float = knob(
        0.0, "sequences with a larger geometric mean are left out; 0 is off", least=0, most=UNBOUNDED
    )

    def check(self) -> None:
        super().check()
        if self.correction_level != "token" and self.correction == "none":
            raise UserError(
                f"algorithm.correction_level={self.correction_level} needs algorithm.correction=truncate or mask"
            )
        if self.routing_replay == "proximal" and self.n_minibatches == 1:
            raise UserError(
                "algorithm.routing_replay=proximal with algorithm.n_minibatches=1 replays nothing: the update's own "
                "pass is the proximal one; set n_minibatches above 1, or routing_replay=off"
            )
        if 0 < self.reject_high <= 1:
            raise UserError(
                f"algorithm.reject_high={self.reject_high} must be above 1, the ratio of equal policies; such as 1.01"
            )
        if self.correction_high <= self.correction_low:
            raise UserError(
                f"algorithm.correction_high={self.correction_high} must be above algorithm.correction_low="
                f"{self.correction_low}"
            )
        if self.aggregate == "constant" and self.aggregate_tokens == 0:
            raise UserError("algorithm.aggregate=constant needs algorithm.aggregate_tokens above 0, such as 1024")


@dataclass(frozen=True)
class ClipConfig(RLConfig):
    """Knobs of algorithms with PPO's clip."""

    eps_clip: float = knob(
        0.2, "the ratio to the proximal policy is clipped to 1 - eps_clip .. 1 + eps_clip", above=0, below=1
    )


@dataclass(frozen=True)
class GroupConfig(RLConfig):
    """Knobs of algorithms that normalise rewards within a group."""

    advantage_eps: float = knob(1e-6, "added to the standard deviation of a group's rewards", above=0, most=MAX_WEIGHT)


class Algorithm(ABC):
    """Base class of RL algorithms.

    `advantages` gets the global batch with token-aligned tensors. `loss` gets a microbatch, in which every tensor is
    aligned with `logprobs`.
    """

    min_group: int = 1  # completions per prompt that the advantages need
    needs_critic: ClassVar[bool] = False  # True if `advantages` reads `values`
    needs_teacher: ClassVar[bool] = False  # True if a teacher judges the tokens (see `opd.py`)
    routing_replay: str = "off"  # whose choice of experts the policy replays
    needs_prox_logp: bool = True  # True if `prox_logp` is read before the update's first forward pass computes it
    workflow: ClassVar[str] = "rlvr"  # name of the rollout workflow

    def __init__(self, config: RLConfig) -> None:
        self.n_minibatches = config.n_minibatches
        self.routing_replay = config.routing_replay
        self.needs_reference = config.kl_coef > 0

    @abstractmethod
    def advantages(self, batch: PackedBatch) -> Tensor:
        """Returns float32 `[total_tokens]`, 0 where `loss_mask` is not set."""

    @abstractmethod
    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, Metrics]:
        """Returns the mean loss of a microbatch and its metrics: scalars, maxima if named `*_max`.

        A metric counts with its microbatch's loss weight, or as a `TokenMean` with its tokens.
        """

    @abstractmethod
    def loss_weight(self, data: PackedBatch) -> Tensor:
        """Returns the weight of a microbatch's mean in the global batch."""

    def by_token(self, given_prox_logp: bool) -> bool:
        """True if the loss's gradient at a token depends on no other token's log-prob or entropy.

        The LM head then computes logits once where it does not keep them, and `loss` is called once more for each of
        its chunks. Without `given_prox_logp`, the update's own log-probs are the proximal ones.
        """
        return False

    def should_accept(self, group: PackedBatch) -> bool:
        """True if the completions of a prompt are worth training on; otherwise another prompt is sampled."""
        return True


def trained_tokens(batch: PackedBatch) -> Tensor:
    """Counts the trained tokens of each sequence, float32 `[num_seqs]`."""
    return sum_per_sequence(batch["loss_mask"].float(), batch)


def sum_per_sequence(values: Tensor, batch: PackedBatch) -> Tensor:
    """Sums `values` `[total_tokens]` over each sequence, float32 `[num_seqs]`. Tokens not to be summed must hold 0."""
    ends = torch.cat((values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)))[batch.cu_seqlens.long()]
    return ends.diff().to(torch.float32)


def sum_per_sample(values: Tensor, batch: PackedBatch) -> Tensor:
    """Sums `values` `[total_tokens]` over each sample, float32 `[num_samples]`. Tokens not to be summed must hold 0."""
    sums = torch.zeros(batch.num_samples, dtype=torch.float64)
    return sums.index_add_(0, batch.samples, sum_per_sequence(values, batch).double()).to(torch.float32)


def sample_cu_seqlens(batch: PackedBatch) -> Tensor:
    """Bounds of the samples, int32 `[num_samples + 1]`: returns run on from one segment to the next.

    Raises:
        ValueError: the segments of a sample are not next to each other.
    """
    samples = batch.samples
    begins = torch.cat((torch.ones(min(1, batch.num_seqs), dtype=torch.bool), samples.diff() != 0))
    if int(begins.sum()) != batch.num_samples:
        raise ValueError("the segments of a sample must be next to each other in the batch; keep their order")
    return torch.cat((batch.cu_seqlens[:-1][begins], batch.cu_seqlens[-1:]))


def shares(data: PackedBatch) -> Tensor:
    """Share of each sequence in its sample's trained tokens, float32 `[num_seqs]`; 1 is a whole sample.

    Segments of a sample may be in different microbatches. So `sample_tokens` `[num_seqs]` has the trained tokens of all
    of them; without it every sequence is a sample.
    """
    return trained_tokens(data) / _tokens_of_samples(data).clamp(min=1)


def _tokens_of_samples(data: PackedBatch) -> Tensor:
    """Trained tokens of each sequence's sample, in this and other microbatches, float32 `[num_seqs]`."""
    if "sample_tokens" in data:
        return data["sample_tokens"]
    return trained_tokens(data)


def token_weights(data: PackedBatch, aggregate: str, aggregate_tokens: int = 0) -> Tensor:
    """Returns the weight of each token's loss in the microbatch's mean, float32 `[total_tokens]`.

        token       1 / all trained tokens
        sequence    1 / (trained tokens of its sample x samples)
        constant    1 / (aggregate_tokens x samples)

    `samples` counts only samples with a trained token, and of a sample the share that is in the microbatch.
    """
    mask = data["loss_mask"].float()
    if aggregate == "token":
        return mask / mask.sum().clamp(min=1)
    samples = shares(data).sum()
    lengths = _tokens_of_samples(data)
    per_sequence = (
        1 / lengths.clamp(min=1) if aggregate == "sequence" else torch.full_like(lengths, 1 / aggregate_tokens)
    )
    per_sequence = per_sequence / torch.where(samples > 0, samples, 1.0)
    return mask * torch.repeat_interleave(per_sequence, data.lengths, output_size=data.total_tokens)


def broadcast_to_tokens(values: Tensor, batch: PackedBatch) -> Tensor:
    """Spreads one value per sample `[num_samples]` over its trained tokens `[total_tokens]`; 0 elsewhere.

    Raises:
        ValueError: there is another number of values.
    """
    if values.shape != (batch.num_samples,):
        raise ValueError(f"values of shape {tuple(values.shape)} for {batch.num_samples} samples; give one a sample")
    spread = torch.repeat_interleave(values[batch.samples], batch.lengths, output_size=batch.total_tokens)
    return spread.masked_fill(~batch["loss_mask"].bool(), 0.0)
