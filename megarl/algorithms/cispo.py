"""CISPO: clipped importance-sampling weights (MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5).

GRPO's advantages; the ratio is clipped and held fixed, so that no token loses its gradient:

    L = - mean over trained tokens of sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_i log pi(o_t)

The paper leaves the lower side open: `clip_low=1`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.base import GroupConfig, GroupRelative, check_clips
from megarl.knobs import knob


@dataclass(frozen=True)
class CISPOConfig(GroupConfig):
    """Knobs of CISPO."""

    clip_low: float = knob(1.0, "the weight is clipped below at 1 - clip_low; 1 leaves it open")
    clip_high: float = knob(4.0, "the weight is clipped above at 1 + clip_high")

    def check(self) -> None:
        super().check()
        check_clips(self.clip_low, self.clip_high)


class CISPO(GroupRelative):
    """CISPO, given its config."""

    def __init__(self, config: CISPOConfig) -> None:
        super().__init__(config, clip_low=config.clip_low, clip_high=config.clip_high, objective="cispo")
