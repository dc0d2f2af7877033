"""ReMax: REINFORCE with the greedy completion's reward as baseline (Li et al., https://arxiv.org/abs/2310.10505).

    A_i = r_i - r(greedy completion of the same prompt)

The workflow of this name samples both and returns the difference as the reward, so nothing is left to subtract.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.base import RLConfig, broadcast_to_tokens
from megarl.algorithms.reinforce import UnclippedPolicyGradient
from megarl.types import PackedBatch


@dataclass(frozen=True)
class ReMaxConfig(RLConfig):
    """Knobs of ReMax: those that all have."""


class ReMax(UnclippedPolicyGradient):
    """ReMax, given its config."""

    workflow = "remax"

    def advantages(self, batch: PackedBatch) -> Tensor:
        return broadcast_to_tokens(self.sequence_rewards(batch), batch)
