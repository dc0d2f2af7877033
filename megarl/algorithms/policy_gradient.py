"""Clipped, ratio-weighted policy gradients: the loss that PPO, GRPO and their kin share, and group-relative advantages.

An algorithm sets `clip_low` and `clip_high`, the bounds of the ratio to the proximal policy, and the shape of the
objective. The fused kernel clips the ratio and computes loss and gradient of each token, by the formulas in
`csrc/loss/policy_loss_math.h` (called through `megarl/ops/loss.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.base import (
    Algorithm,
    GroupConfig,
    RLConfig,
    broadcast_to_tokens,
    shares,
    sum_per_sample,
    token_weights,
)
from megarl.algorithms.correction import SequenceCorrection
from megarl.algorithms.kl_penalty import kl_to_reference
from megarl.ops.advantage import group_advantage
from megarl.ops.loss import PolicyLossSettings, policy_loss, policy_loss_metrics
from megarl.types import Metrics, PackedBatch, TokenMean, trained_tokens_of_samples


class PolicyGradient(Algorithm):
    """Ratio-weighted policy gradients, by the fused token loss.

    A sample is a sequence, or the segments of a conversation that was cut in several (`PackedBatch.samples`). Rewards,
    groups and advantages have one value a sample. The ratio of a sequence (`ratio="sequence"`) is a segment's.

    Reads `rewards` and `group_ids` `[num_seqs]`, `loss_mask` and `prox_logp` `[total_tokens]`. `prox_logp` is the
    proximal policy, in the denominator of the ratio. Some settings also need `ref_logp` or `rollout_logprobs`
    `[total_tokens]`.
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
        self.sequence_correction = SequenceCorrection(
            config.correction_level, config.correction_veto, config.reject_low, config.reject_high
        )

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, Metrics]:
        mask, settings, correction = data["loss_mask"].bool(), self.settings, self.sequence_correction
        prox_logp, advantages, rollout_logprobs = data["prox_logp"], data["advantages"], None
        if settings.correction != "none":
            rollout_logprobs = correction.rollout_logprobs(prox_logp, data)
        if correction.rejects:
            kept = correction.kept(prox_logp, data)
            advantages = advantages * kept
        result = policy_loss(
            logprobs,
            prox_logp,
            advantages,
            mask,
            settings=settings,
            ref_logprobs=data["ref_logp"] if settings.kl_estimator != "none" else None,
            rollout_logprobs=rollout_logprobs,
            entropy=entropy,
            cu_seqlens=data.cu_seqlens if settings.ratio == "sequence" else None,
        )
        weights = token_weights(data, self.base.aggregate, self.base.aggregate_tokens)
        means = policy_loss_metrics(result.sums)
        metrics = {
            "clip_fraction": means["clipped_low"] + means["clipped_high"],
            **{name: means[name] for name in ("approx_kl", "entropy")},
        }
        if settings.kl_estimator != "none":
            metrics["ref_kl"] = means["ref_kl"]
        if settings.correction != "none":
            metrics.update({name: means[name] for name in ("correction_weight", "corrected")})
        if correction.rejects:
            metrics["rejected"] = (mask & ~kept).sum() / mask.sum().clamp(min=1)
        of_tokens = {name: TokenMean(value.float(), means["tokens"]) for name, value in metrics.items()}
        return (result.loss * weights).sum(), {**of_tokens, "ratio_max": means["ratio_max"].float()}

    def loss_weight(self, data: PackedBatch) -> Tensor:
        if self.base.aggregate == "token":
            return data["loss_mask"].sum()
        return shares(data).sum()

    def by_token(self, given_prox_logp: bool) -> bool:
        """Answers by the settings, for this class's own loss; False where a subclass has another."""
        if type(self).loss is not PolicyGradient.loss:
            return False
        rejects, level = self.sequence_correction.rejects, self.sequence_correction.level
        if self.settings.ratio == "token":
            return given_prox_logp or not (rejects or level != "token")
        # A sequence's ratio to its own log-probs is always 1.
        return not (given_prox_logp or rejects or self.settings.correction != "none")

    def groups(self, batch: PackedBatch) -> Tensor:
        """Returns group ids of the samples, int64 `[num_samples]`.

        A sample without a trained token, for example because its reward failed, gets a group of its own. It then
        changes no other sample's advantage.
        """
        untrained = trained_tokens_of_samples(batch) == 0
        return torch.where(untrained, -1 - torch.arange(batch.num_samples), batch.of_samples("group_ids"))

    def sequence_rewards(self, batch: PackedBatch) -> Tensor:
        """Returns the samples' rewards, float32 `[num_samples]`; with `kl_in=reward` minus the KL to the reference."""
        rewards = batch.of_samples("rewards").float()
        if self.needs_reference and self.base.kl_in == "reward":
            rewards = rewards - self.base.kl_coef * sum_per_sample(
                kl_to_reference(batch, self.base.kl_estimator), batch
            )
        return rewards

    def token_rewards(self, batch: PackedBatch) -> Tensor:
        """Returns the rewards at the samples' last trained tokens, float32 `[total_tokens]`.

        With `kl_in=reward` minus the KL.
        """
        mask = batch["loss_mask"].bool()
        rewards = torch.zeros(batch.total_tokens)
        if self.needs_reference and self.base.kl_in == "reward":
            rewards = -self.base.kl_coef * kl_to_reference(batch, self.base.kl_estimator)
        positions = torch.where(mask, torch.arange(batch.total_tokens), -1)
        owner = batch.owners
        lasts = torch.full((batch.num_samples,), -1).scatter_reduce(0, owner, positions, "amax")
        trained = lasts >= 0
        rewards[lasts[trained]] += batch.of_samples("rewards").float()[trained]
        return rewards


class GroupRelative(PolicyGradient):
    """Policy gradients with GRPO's advantages: (r - mean(r)) / (std(r) + eps) within the group, for every token."""

    min_group = 2

    def __init__(
        self, config: GroupConfig, *, clip_low: float, clip_high: float, objective: str = "clip", ratio: str = "token"
    ) -> None:
        super().__init__(config, clip_low=clip_low, clip_high=clip_high, objective=objective, ratio=ratio)
        self.advantage_eps = config.advantage_eps

    def advantages(self, batch: PackedBatch) -> Tensor:
        per_sample = group_advantage(
            self.sequence_rewards(batch), self.groups(batch), mode="mean_std", eps=self.advantage_eps
        )
        return broadcast_to_tokens(per_sample, batch)
