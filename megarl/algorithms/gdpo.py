"""GDPO: group reward-decoupled normalisation (Liu et al., https://arxiv.org/abs/2601.05242, section 3).

Each of several rewards r^1..r^n is normalised within its group before they are summed. A reward with a small spread
then counts as much as one with a large spread. The sum is normalised over the batch:

    A_i = sum_k w_k (r_i^k - mean(r^k)) / (std(r^k) + eps),   then (A - mean(A)) / std(A) over the batch's completions

Reads `reward_columns` float32 `[num_seqs, n]`, the unweighted rewards from workflows with several reward functions. NaN
marks a reward that does not apply to a completion: it adds 0, and the rest of its group is normalised without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import ClipConfig, GroupConfig, broadcast_to_tokens
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.knobs import MAX_WEIGHT, UserError, knob
from megarl.ops.advantage import group_advantage, whiten
from megarl.types import PackedBatch, trained_tokens_of_samples


@dataclass(frozen=True)
class GDPOConfig(ClipConfig, GroupConfig):
    """Knobs of GDPO."""

    reward_weights: list[float] = knob(
        factory=list, meaning="weight of each reward; empty: 1 for all", least=-MAX_WEIGHT, most=MAX_WEIGHT
    )
    normalize_batch: bool = knob(True, "normalise the summed advantages to mean 0 and variance 1 over the batch")

    def check(self) -> None:
        super().check()
        if self.kl_coef > 0 and self.kl_in == "reward":
            raise UserError("algorithm.kl_in=reward: GDPO normalises each reward separately; use kl_in=loss")


class GDPO(PolicyGradient):
    """GDPO."""

    min_group = 2

    def __init__(self, config: GDPOConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip, objective="clip", ratio="token")
        self.config = config

    def advantages(self, batch: PackedBatch) -> Tensor:
        columns = batch.of_samples("reward_columns").float()
        weights = torch.tensor(self.config.reward_weights or [1.0] * columns.shape[1])
        if len(weights) != columns.shape[1]:
            raise UserError(
                f"algorithm.reward_weights has {len(weights)} values and the samples carry {columns.shape[1]} rewards; "
                "give one weight per reward"
            )
        parts = [self._of_one_reward(column.contiguous(), batch) for column in columns.unbind(1)]
        summed = torch.stack(parts, 1) @ weights
        if self.config.normalize_batch:
            summed = whiten(summed, trained_tokens_of_samples(batch) > 0)
        return broadcast_to_tokens(summed, batch)

    def _of_one_reward(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        """Advantages by one reward, float32 `[num_samples]`: 0 where it is NaN, and the group's others normalised."""
        missing = rewards.isnan()
        alone = -1 - batch.num_samples - torch.arange(batch.num_samples)  # a group of one has advantage 0
        groups = torch.where(missing, alone, self.groups(batch))
        return group_advantage(rewards.nan_to_num(0.0), groups, eps=self.config.advantage_eps)
