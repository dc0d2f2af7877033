"""REINFORCE++ (Hu et al., https://arxiv.org/abs/2501.03262, section 3).

PPO's clipped objective without a critic. The KL to the reference is part of every token's reward, and advantages are
normalised over the whole batch:

    r_t = 1{t is the last token} r - kl_coef KL_t
    A_t = sum over s >= t of r_s,   then (A - mean(A)) / std(A) over all trained tokens of the batch

`group_baseline` is the paper's variant for several completions per prompt. It first subtracts the group's mean reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import KL_PLACES, ClipConfig, sample_cu_seqlens
from megarl.algorithms.kl_penalty import KL_ESTIMATORS
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.knobs import knob
from megarl.ops.advantage import gae_packed, group_advantage, whiten
from megarl.types import PackedBatch


@dataclass(frozen=True)
class ReinforcePPConfig(ClipConfig):
    """Knobs of REINFORCE++."""

    kl_in: str = knob("reward", "where the KL to the reference is applied: loss or reward", choices=KL_PLACES)
    kl_estimator: str = knob(
        "k1", "estimator of the KL to the reference: k1, k2 or k3 (Schulman)", choices=KL_ESTIMATORS
    )
    gamma: float = knob(1.0, "discount of later rewards, per token", above=0, most=1)
    group_baseline: bool = knob(False, "first subtract the mean reward of the prompt's completions")


class ReinforcePP(PolicyGradient):
    """REINFORCE++."""

    def __init__(self, config: ReinforcePPConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip, objective="clip", ratio="token")
        self.config = config
        self.min_group = 2 if config.group_baseline else 1

    def advantages(self, batch: PackedBatch) -> Tensor:
        mask = batch["loss_mask"].bool()
        if self.config.group_baseline:
            centred = group_advantage(batch.of_samples("rewards").float(), self.groups(batch), mode="mean")
            sequences = {**batch.sequences, "rewards": centred[batch.samples]}
            batch = PackedBatch(batch.cu_seqlens, batch.tokens, sequences)
        rewards = self.token_rewards(batch)
        # Returns equal GAE's advantages with lambda 1 and all values 0.
        bounds = sample_cu_seqlens(batch)
        returns, _ = gae_packed(rewards, torch.zeros_like(rewards), mask, bounds, gamma=self.config.gamma)
        return whiten(returns, mask)
