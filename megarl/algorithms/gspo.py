"""GSPO: group sequence policy optimisation (Zheng et al., https://arxiv.org/abs/2507.18071, equations 5 to 7).

GRPO's advantages with one length-normalised importance ratio per completion:

    s_i = exp(1/|o_i| sum_t log pi(o_t) / pi_prox(o_t))
    L   = - mean over completions of min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

The clip is two orders of magnitude tighter than a per-token clip.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.base import AGGREGATIONS, UNBOUNDED, GroupConfig
from megarl.algorithms.policy_gradient import GroupRelative
from megarl.knobs import knob


@dataclass(frozen=True)
class GSPOConfig(GroupConfig):
    """Knobs of GSPO."""

    aggregate: str = knob(
        "sequence",
        "mean of the loss: token (all tokens), sequence (each sequence first) or constant (aggregate_tokens)",
        choices=AGGREGATIONS,
    )
    clip_low: float = knob(3e-4, "the sequence ratio is clipped below at 1 - clip_low", above=0, most=1)
    clip_high: float = knob(4e-4, "the sequence ratio is clipped above at 1 + clip_high", above=0, most=UNBOUNDED)


class GSPO(GroupRelative):
    """GSPO."""

    def __init__(self, config: GSPOConfig) -> None:
        super().__init__(config, clip_low=config.clip_low, clip_high=config.clip_high, ratio="sequence")
