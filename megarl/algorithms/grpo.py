"""GRPO: group-relative policy optimisation (Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1).

For prompt q with completions o_1..o_G and rewards r_1..r_G:

    A_i   = (r_i - mean(r)) / (std(r) + eps)                          one value for all tokens of o_i
    rho_t = pi(o_t) / pi_prox(o_t)
    L     = - mean of min(rho_t A_i, clip(rho_t, 1 - eps_clip, 1 + eps_clip) A_i)

The mean is over all trained tokens of the global batch. The paper averages within each completion first:
`aggregate=sequence`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.base import ClipConfig, GroupConfig
from megarl.algorithms.policy_gradient import GroupRelative


@dataclass(frozen=True)
class GRPOConfig(ClipConfig, GroupConfig):
    """Knobs of GRPO."""


class GRPO(GroupRelative):
    """GRPO."""

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip)
