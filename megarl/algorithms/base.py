"""What an RL algorithm decides: the advantage of every token, the loss, and how microbatch losses are weighted.

Most algorithms differ in their advantages and in a few settings of one objective, `ops.loss.policy_loss`; they derive
from `PolicyGradient` and fill in both, or from `GroupRelative`, which has GRPO's advantages. An algorithm of another
shape derives from `Algorithm`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megarl.knobs import UserError, knob
from megarl.ops.advantage import group_advantage
from megarl.ops.loss import CORRECTIONS, PolicyLossSettings, policy_loss, policy_loss_metrics
from megarl.types import PackedBatch

AGGREGATIONS = ("token", "sequence", "constant")
KL_PLACES = ("loss", "reward")
KL_ESTIMATORS = ("k1", "k2", "k3")
UNBOUNDED = 1e9  # a clip that never bites: ratios are held below e^20


@dataclass(frozen=True)
class AlgorithmConfig:
    """What the configuration calls an algorithm: any of its subclasses."""

    def check(self) -> None:
        """Refuses values that no run could use.

        Raises:
            UserError: naming the knob.
        """


@dataclass(frozen=True)
class RLConfig(AlgorithmConfig):
    """Knobs that every RL algorithm has."""

    n_minibatches: int = knob(1, "optimizer steps taken on each rollout batch, each on its own part of it")
    aggregate: str = knob(
        "token", "the loss is a mean over token, over each sequence and then over them, or a constant per sequence"
    )
    aggregate_tokens: int = knob(0, "aggregate=constant: each sequence's sum is divided by this many tokens")
    entropy_coef: float = knob(0.0, "weight of an entropy bonus")
    kl_coef: float = knob(0.0, "weight of the KL to the reference policy; above 0 a frozen policy is kept beside")
    kl_in: str = knob("loss", "where that KL goes: loss or reward")
    kl_estimator: str = knob("k3", "estimate of that KL from one sample: k1, k2 or k3 (Schulman)")
    correction: str = knob("none", "weight by trainer/rollout probability: none, truncate (TIS) or mask (IcePop)")
    correction_low: float = knob(0.5, "mask: tokens of a smaller weight are left out")
    correction_high: float = knob(2.0, "truncate: the largest weight; mask: tokens of a larger weight are left out")

    def check(self) -> None:
        _at_least("n_minibatches", self.n_minibatches, 1)
        _one_of("aggregate", self.aggregate, AGGREGATIONS)
        _one_of("kl_in", self.kl_in, KL_PLACES)
        _one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _one_of("correction", self.correction, CORRECTIONS)
        _at_least("kl_coef", self.kl_coef, 0)
        _at_least("correction_low", self.correction_low, 0)
        if self.correction_high <= self.correction_low:
            raise UserError(
                f"algorithm.correction_high={self.correction_high} must be above algorithm.correction_low="
                f"{self.correction_low}"
            )
        if self.aggregate == "constant":
            _at_least("aggregate_tokens", self.aggregate_tokens, 1)


@dataclass(frozen=True)
class ClipConfig(RLConfig):
    """Knobs of algorithms that clip as PPO does."""

    eps_clip: float = knob(0.2, "the ratio to the proximal policy is clipped to 1 - eps_clip .. 1 + eps_clip")

    def check(self) -> None:
        super().check()
        if not 0 < self.eps_clip < 1:
            raise UserError(f"algorithm.eps_clip={self.eps_clip} must lie between 0 and 1")


@dataclass(frozen=True)
class GroupConfig(RLConfig):
    """Knobs of algorithms that normalise rewards within a group."""

    advantage_eps: float = knob(1e-6, "added to the standard deviation of a group's rewards")


def check_clips(low: float, high: float) -> None:
    """Refuses a clip to 1 - low .. 1 + high that leaves no room, or lets negative ratios in."""
    if not (0 < low <= 1 and high > 0):
        raise UserError(f"algorithm.clip_low={low} must lie in (0, 1] and algorithm.clip_high={high} above 0")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"algorithm.{name}={value} is not one of {', '.join(allowed)}")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise UserError(f"algorithm.{name}={value} must be at least {least}")


class Algorithm(ABC):
    """An algorithm, given its config. Per-token tensors are token-aligned in `advantages`; in `loss` every tensor of
    `data` is aligned with `logprobs`."""

    min_group: int = 1  # completions of a prompt that the advantages need
    needs_critic: ClassVar[bool] = False  # whether `advantages` reads `values`
    needs_prox_logp: bool = True  # whether `prox_logp` is read before the update's first forward pass has found it
    workflow: ClassVar[str] = "rlvr"  # how prompts are sampled

    def __init__(self, config: RLConfig) -> None:
        self.n_minibatches = config.n_minibatches
        self.needs_reference = config.kl_coef > 0

    @abstractmethod
    def advantages(self, batch: PackedBatch) -> Tensor:
        """float32 `[total_tokens]`, zero where `loss_mask` is not set."""

    @abstractmethod
    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a microbatch and its metrics (scalars; those named `*_max` are maxima)."""

    @abstractmethod
    def loss_weight(self, data: PackedBatch) -> Tensor:
        """The weight of a microbatch's mean in the global batch."""

    def should_accept(self, group: PackedBatch) -> bool:
        """Whether the completions of a prompt are worth training on; the executor samples others where not."""
        return True


class PolicyGradient(Algorithm):
    """Ratio-weighted policy gradients, by the fused token loss.

    Reads `rewards` and `group_ids` `[num_seqs]`; `loss_mask`, `prox_logp` (the policy that the ratio is taken
    against), and where the settings need them `ref_logp` and `rollout_logprobs`, `[total_tokens]`.
    """

    def __init__(
        self,
        config: RLConfig,
        *,
        clip_low: float,
        clip_high: float,
        objective: str,
        ratio: str,
        dual_clip: float | None = None,
    ) -> None:
        super().__init__(config)
        self.base = config
        self.needs_prox_logp = config.n_minibatches > 1 or (self.needs_reference and config.kl_in == "reward")
        self.settings = PolicyLossSettings(
            objective=objective,
            ratio=ratio,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            kl_estimator=config.kl_estimator if self.needs_reference and config.kl_in == "loss" else "none",
            kl_coef=config.kl_coef,
            entropy_coef=config.entropy_coef,
            correction=config.correction,
            correction_low=config.correction_low,
            correction_high=config.correction_high,
        )

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask, settings = data["loss_mask"].bool(), self.settings
        result = policy_loss(
            logprobs,
            data["prox_logp"],
            data["advantages"],
            mask,
            settings=settings,
            ref_logprobs=data["ref_logp"] if settings.kl_estimator != "none" else None,
            rollout_logprobs=data["rollout_logprobs"] if settings.correction != "none" else None,
            entropy=entropy,
            cu_seqlens=data.cu_seqlens if settings.ratio == "sequence" else None,
        )
        weights = token_weights(data, self.base.aggregate, self.base.aggregate_tokens)
        figures = policy_loss_metrics(result.sums)
        metrics = {
            "clip_fraction": figures["clipped_low"] + figures["clipped_high"],
            **{name: figures[name] for name in ("approx_kl", "entropy", "ratio_max")},
        }
        if settings.kl_estimator != "none":
            metrics["ref_kl"] = figures["ref_kl"]
        if settings.correction != "none":
            metrics.update({name: figures[name] for name in ("correction_weight", "corrected")})
        return (result.loss * weights).sum(), {name: torch.tensor(value) for name, value in metrics.items()}

    def loss_weight(self, data: PackedBatch) -> Tensor:
        if self.base.aggregate == "token":
            return data["loss_mask"].sum()
        return (trained_tokens(data) > 0).sum()

    def groups(self, batch: PackedBatch) -> Tensor:
        """int64 `[num_seqs]`: group ids, where a sequence without a trained token (its reward failed, say) is a group
        of its own, so that it moves no other's advantage."""
        alone = trained_tokens(batch) == 0
        return torch.where(alone, -1 - torch.arange(batch.num_seqs), batch["group_ids"])

    def sequence_rewards(self, batch: PackedBatch) -> Tensor:
        """float32 `[num_seqs]`: the rewards, less the KL to the reference where it belongs into them."""
        rewards = batch["rewards"].float()
        if self.needs_reference and self.base.kl_in == "reward":
            rewards = rewards - self.base.kl_coef * sum_per_sequence(self._kl(batch), batch)
        return rewards

    def token_rewards(self, batch: PackedBatch) -> Tensor:
        """float32 `[total_tokens]`: the reward at the last trained token, less the KL at every token."""
        mask = batch["loss_mask"].bool()
        rewards = torch.zeros(batch.total_tokens)
        if self.needs_reference and self.base.kl_in == "reward":
            rewards = -self.base.kl_coef * self._kl(batch)
        positions = torch.where(mask, torch.arange(batch.total_tokens), -1)
        for sequence, last in enumerate(int(part.max()) for part in positions.split(batch.lengths.tolist())):
            if last >= 0:
                rewards[last] += batch["rewards"][sequence]
        return rewards

    def _kl(self, batch: PackedBatch) -> Tensor:
        """float32 `[total_tokens]`: estimate of KL(policy || reference) at each trained token, 0 elsewhere."""
        r = (batch["ref_logp"] - batch["prox_logp"]).masked_fill(~batch["loss_mask"].bool(), 0.0)
        if self.base.kl_estimator == "k1":
            return -r
        return r.square() / 2 if self.base.kl_estimator == "k2" else torch.expm1(r) - r


class GroupRelative(PolicyGradient):
    """Policy gradients with GRPO's advantages: (r - mean(r)) / (std(r) + eps) within the group, for every token."""

    min_group = 2

    def __init__(
        self, config: GroupConfig, *, clip_low: float, clip_high: float, objective: str = "clip", ratio: str = "token"
    ) -> None:
        super().__init__(config, clip_low=clip_low, clip_high=clip_high, objective=objective, ratio=ratio)
        self.advantage_eps = config.advantage_eps

    def advantages(self, batch: PackedBatch) -> Tensor:
        per_sequence = group_advantage(
            self.sequence_rewards(batch), self.groups(batch), mode="mean_std", eps=self.advantage_eps
        )
        return broadcast_to_tokens(per_sequence, batch)


def trained_tokens(batch: PackedBatch) -> Tensor:
    """float32 `[num_seqs]`: how many tokens of each sequence are trained on."""
    return sum_per_sequence(batch["loss_mask"].float(), batch)


def sum_per_sequence(values: Tensor, batch: PackedBatch) -> Tensor:
    """float32 `[num_seqs]`: sums of `values` `[total_tokens]`, which must be 0 outside what counts."""
    ends = torch.cat((values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)))[batch.cu_seqlens.long()]
    return ends.diff().to(torch.float32)


def token_weights(data: PackedBatch, aggregate: str, aggregate_tokens: int = 0) -> Tensor:
    """float32 `[total_tokens]`: what each token's loss counts in the microbatch's mean.

    token: 1 / all trained tokens; sequence: 1 / (trained tokens of its sequence x sequences); constant: 1 /
    (`aggregate_tokens` x sequences). Sequences without a trained token count nowhere.
    """
    mask = data["loss_mask"].float()
    if aggregate == "token":
        return mask / mask.sum().clamp(min=1)
    lengths = trained_tokens(data)
    sequences = (lengths > 0).sum().clamp(min=1)
    per_sequence = (
        1 / lengths.clamp(min=1) if aggregate == "sequence" else torch.full_like(lengths, 1 / aggregate_tokens)
    )
    return mask * (per_sequence / sequences).repeat_interleave(data.lengths.to(mask.device))


def broadcast_to_tokens(values: Tensor, batch: PackedBatch) -> Tensor:
    """One value a sequence `[num_seqs]` to its trained tokens `[total_tokens]`; zero elsewhere."""
    spread = values.repeat_interleave(batch.lengths)
    return spread.masked_fill(~batch["loss_mask"].bool(), 0.0)
