"""ReMax: REINFORCE with the greedy completion's reward as baseline (Li et al., https://arxiv.org/abs/2310.10505).

    A_i = r_i - r(greedy completion of the same prompt)

The `remax` workflow samples both completions and returns this difference as the reward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.base import RLConfig, broadcast_to_tokens
from megarl.algorithms.reinforce import UnclippedPolicyGradient
from megarl.types import PackedBatch


@dataclass(frozen=True)
class ReMaxConfig(RLConfig):
    """Knobs of ReMax: only the common ones."""


class ReMax(UnclippedPolicyGradient):
    """ReMax."""

    workflow = "remax"

    def advantages(self, batch: PackedBatch) -> Tensor:
        return broadcast_to_tokens(self.sequence_rewards(batch), batch)
