"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al., https://arxiv.org/abs/2402.14740, equation 8).

    A_i = r_i - mean of the other completions' rewards in the group

The loss is REINFORCE's. The paper subtracts the KL to the reference from the reward: `kl_in=reward`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.base import RLConfig, broadcast_to_tokens
from megarl.algorithms.reinforce import UnclippedPolicyGradient
from megarl.ops.advantage import group_advantage
from megarl.types import PackedBatch


@dataclass(frozen=True)
class RLOOConfig(RLConfig):
    """Knobs of RLOO: only the common ones."""


class RLOO(UnclippedPolicyGradient):
    """RLOO."""

    min_group = 2

    def advantages(self, batch: PackedBatch) -> Tensor:
        per_sample = group_advantage(self.sequence_rewards(batch), self.groups(batch), mode="leave_one_out")
        return broadcast_to_tokens(per_sample, batch)
