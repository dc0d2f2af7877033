"""Dr. GRPO: GRPO done right (Liu et al., https://arxiv.org/abs/2503.20783, section 3.2).

GRPO without its two biases. Advantages are not divided by the group's standard deviation. Each completion's summed
token loss is divided by a constant, not by its length:

    A_i = r_i - mean(r)
    L   = - mean over completions of 1/C sum_t min(rho_t A_i, clip(rho_t, 1 - eps_clip, 1 + eps_clip) A_i)

C is `aggregate_tokens`, the generation budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.base import AGGREGATIONS, ClipConfig, broadcast_to_tokens
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.knobs import knob
from megarl.ops.advantage import group_advantage
from megarl.types import PackedBatch


@dataclass(frozen=True)
class DrGRPOConfig(ClipConfig):
    """Knobs of Dr. GRPO."""

    aggregate: str = knob(
        "constant",
        "mean of the loss: token (all tokens), sequence (each sequence first) or constant (aggregate_tokens)",
        choices=AGGREGATIONS,
    )


class DrGRPO(PolicyGradient):
    """Dr. GRPO."""

    min_group = 2

    def __init__(self, config: DrGRPOConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip, objective="clip", ratio="token")

    def advantages(self, batch: PackedBatch) -> Tensor:
        return broadcast_to_tokens(
            group_advantage(self.sequence_rewards(batch), self.groups(batch), mode="mean"), batch
        )
