"""Decoupled PPO (Hilton et al., https://arxiv.org/abs/2110.00641; AReaL, https://arxiv.org/abs/2505.24298, 5.2).

For rollouts that are some versions old. The clip is taken around the trainer's policy before the update (the proximal
policy, `prox_logp`), and the distance of that policy from the one that sampled (`rollout_logprobs`) is a weight:

    L = - mean of min(w_t, correction_high) min(rho_t A_i, clip(rho_t, 1 - eps_clip, 1 + eps_clip) A_i)
    w_t = pi_prox(o_t) / pi_rollout(o_t),   rho_t = pi(o_t) / pi_prox(o_t)

A_i are GRPO's, so no critic is needed; PPO with `correction=truncate` is the same with one.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.base import ClipConfig, GroupConfig, GroupRelative
from megarl.knobs import UserError, knob


@dataclass(frozen=True)
class DecoupledPPOConfig(ClipConfig, GroupConfig):
    """Knobs of decoupled PPO."""

    correction: str = knob("truncate", "weight by trainer/rollout probability: none, truncate (TIS) or mask (IcePop)")
    correction_low: float = knob(0.0, "mask: tokens of a smaller weight are left out")
    correction_high: float = knob(5.0, "truncate: the largest weight; mask: tokens of a larger weight are left out")

    def check(self) -> None:
        super().check()
        if self.correction == "none":
            raise UserError(
                "algorithm.correction=none: decoupled PPO is its weight; use truncate or mask, or algorithm=grpo"
            )


class DecoupledPPO(GroupRelative):
    """Decoupled PPO, given its config."""

    def __init__(self, config: DecoupledPPOConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip)
