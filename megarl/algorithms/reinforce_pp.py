"""REINFORCE++ (Hu et al., https://arxiv.org/abs/2501.03262, section 3).

PPO's clipped objective without a critic; the KL to the reference is part of the reward of every token, and advantages
are normalised over the whole batch:

    r_t = 1{t is the last token} r - kl_coef KL_t
    A_t = sum over s >= t of r_s,   then (A - mean(A)) / std(A) over all trained tokens of the batch

`group_baseline` is the paper's variant for several completions a prompt: the group's mean reward is subtracted first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import ClipConfig, PolicyGradient
from megarl.knobs import UserError, knob
from megarl.ops.advantage import gae_packed, group_advantage, whiten
from megarl.types import PackedBatch


@dataclass(frozen=True)
class ReinforcePPConfig(ClipConfig):
    """Knobs of REINFORCE++."""

    kl_in: str = knob("reward", "where that KL goes: loss or reward")
    kl_estimator: str = knob("k1", "estimate of that KL from one sample: k1, k2 or k3 (Schulman)")
    gamma: float = knob(1.0, "discount of later rewards, per token")
    group_baseline: bool = knob(False, "subtract the mean reward of the prompt's completions first")

    def check(self) -> None:
        super().check()
        if not 0 < self.gamma <= 1:
            raise UserError(f"algorithm.gamma={self.gamma} must lie in (0, 1]")


class ReinforcePP(PolicyGradient):
    """REINFORCE++, given its config."""

    def __init__(self, config: ReinforcePPConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip, objective="clip", ratio="token")
        self.config = config
        self.min_group = 2 if config.group_baseline else 1

    def advantages(self, batch: PackedBatch) -> Tensor:
        mask = batch["loss_mask"].bool()
        if self.config.group_baseline:
            centred = group_advantage(batch["rewards"].float(), self.groups(batch), mode="mean")
            batch = PackedBatch(batch.cu_seqlens, batch.tokens, {**batch.sequences, "rewards": centred})
        rewards = self.token_rewards(batch)
        # Returns are the advantages of GAE with lambda 1 and a value of 0 everywhere.
        returns, _ = gae_packed(rewards, torch.zeros_like(rewards), mask, batch.cu_seqlens, gamma=self.config.gamma)
        return whiten(returns, mask)
