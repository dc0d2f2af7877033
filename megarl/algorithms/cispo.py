"""CISPO: clipped importance-sampling weights (MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5).

GRPO's advantages. The clipped ratio is a constant weight (`sg`: stop-gradient), so every token keeps a gradient:

    L = - mean over trained tokens of sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_i log pi(o_t)

The paper has no lower bound: `clip_low=1`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.base import UNBOUNDED, GroupConfig
from megarl.algorithms.policy_gradient import GroupRelative
from megarl.knobs import knob


@dataclass(frozen=True)
class CISPOConfig(GroupConfig):
    """Knobs of CISPO."""

    clip_low: float = knob(1.0, "lower bound of the weight is 1 - clip_low; 1 is no bound", above=0, most=1)
    clip_high: float = knob(4.0, "upper bound of the weight is 1 + clip_high", above=0, most=UNBOUNDED)


class CISPO(GroupRelative):
    """CISPO."""

    def __init__(self, config: CISPOConfig) -> None:
        super().__init__(config, clip_low=config.clip_low, clip_high=config.clip_high, objective="cispo")
