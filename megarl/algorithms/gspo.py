"""GSPO: group sequence policy optimisation (Zheng et al., https://arxiv.org/abs/2507.18071, equations 5 to 7).

GRPO's advantages with the importance ratio of the whole completion, length-normalised:

    s_i = exp(1/|o_i| sum_t log pi(o_t) / pi_prox(o_t))
    L   = - mean over completions of min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

Its clip is two orders tighter than a token's.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.base import GroupConfig, GroupRelative, check_clips
from megarl.knobs import knob


@dataclass(frozen=True)
class GSPOConfig(GroupConfig):
    """Knobs of GSPO."""

    aggregate: str = knob(
        "sequence", "the loss is a mean over token, over each sequence and then over them, or a constant per sequence"
    )
    clip_low: float = knob(3e-4, "the sequence's ratio is clipped below at 1 - clip_low")
    clip_high: float = knob(4e-4, "the sequence's ratio is clipped above at 1 + clip_high")

    def check(self) -> None:
        super().check()
        check_clips(self.clip_low, self.clip_high)


class GSPO(GroupRelative):
    """GSPO, given its config."""

    def __init__(self, config: GSPOConfig) -> None:
        super().__init__(config, clip_low=config.clip_low, clip_high=config.clip_high, ratio="sequence")
