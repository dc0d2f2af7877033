"""GRPO: group-relative policy optimisation (Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1).

For prompt q with completions o_1..o_G and rewards r_1..r_G:

    A_i   = (r_i - mean(r)) / (std(r) + eps)                          the same for every token of o_i
    rho_t = pi(o_t) / pi_prox(o_t)
    L     = - mean of min(rho_t A_i, clip(rho_t, 1 - eps_clip, 1 + eps_clip) A_i)

The mean runs over all trained tokens of the global batch; `aggregate=sequence` is the paper's, over each completion
first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.base import ClipConfig, GroupConfig, PolicyGradient, broadcast_to_tokens
from megarl.ops.advantage import group_advantage
from megarl.types import PackedBatch


@dataclass(frozen=True)
class GRPOConfig(ClipConfig, GroupConfig):
    """Knobs of GRPO."""


class GRPO(PolicyGradient):
    """GRPO, given its config."""

    min_group = 2

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip, objective="clip", ratio="token")
        self.eps = config.advantage_eps

    def advantages(self, batch: PackedBatch) -> Tensor:
        per_sequence = group_advantage(self.sequence_rewards(batch), self.groups(batch), mode="mean_std", eps=self.eps)
        return broadcast_to_tokens(per_sequence, batch)
