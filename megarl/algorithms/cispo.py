"""CISPO: clipped importance-sampling weights (MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5).

GRPO's advantages; the ratio is clipped and held fixed, so that no token loses its gradient:

    L = - mean over trained tokens of sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_i log pi(o_t)

The paper leaves the lower side open: `clip_low=1`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.base import GroupConfig, PolicyGradient, broadcast_to_tokens, check_clips
from megarl.knobs import knob
from megarl.ops.advantage import group_advantage
from megarl.types import PackedBatch


@dataclass(frozen=True)
class CISPOConfig(GroupConfig):
    """Knobs of CISPO."""

    clip_low: float = knob(1.0, "the weight is clipped below at 1 - clip_low; 1 leaves it open")
    clip_high: float = knob(4.0, "the weight is clipped above at 1 + clip_high")

    def check(self) -> None:
        super().check()
        check_clips(self.clip_low, self.clip_high)


class CISPO(PolicyGradient):
    """CISPO, given its config."""

    min_group = 2

    def __init__(self, config: CISPOConfig) -> None:
        super().__init__(config, clip_low=config.clip_low, clip_high=config.clip_high, objective="cispo", ratio="token")
        self.config = config

    def advantages(self, batch: PackedBatch) -> Tensor:
        per_sequence = group_advantage(
            self.sequence_rewards(batch), self.groups(batch), mode="mean_std", eps=self.config.advantage_eps
        )
        return broadcast_to_tokens(per_sequence, batch)
