"""Decoupled PPO (Hilton et al., https://arxiv.org/abs/2110.00641; AReaL, https://arxiv.org/abs/2505.24298, 5.2).

For rollouts that are several weight versions old. The clip is around the proximal policy, which is the trainer's
policy before the update (`prox_logp`). A weight corrects from the policy that sampled (`rollout_logprobs`) to it:

    L = - mean of min(w_t, correction_high) min(rho_t A_i, clip(rho_t, 1 - eps_clip, 1 + eps_clip) A_i)
    w_t = pi_prox(o_t) / pi_rollout(o_t),   rho_t = pi(o_t) / pi_prox(o_t)

A_i are GRPO's, so no critic is needed. With a critic, use PPO with `correction=truncate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.algorithms.base import UNBOUNDED, ClipConfig, GroupConfig
from megarl.algorithms.policy_gradient import GroupRelative
from megarl.knobs import UserError, knob
from megarl.ops.loss import CORRECTIONS


@dataclass(frozen=True)
class DecoupledPPOConfig(ClipConfig, GroupConfig):
    """Knobs of decoupled PPO."""

    correction: str = knob(
        "truncate",
        "weight each token by trainer/rollout probability: none, truncate (TIS) or mask (IcePop)",
        choices=CORRECTIONS,
    )
    correction_low: float = knob(0.0, "mask: tokens with a smaller weight are left out", least=0, most=UNBOUNDED)
    correction_high: float = knob(
        5.0, "truncate: the largest weight; mask: tokens with a larger weight are left out", above=0, most=UNBOUNDED
    )

    def check(self) -> None:
        super().check()
        if self.correction == "none":
            raise UserError(
                "algorithm.correction=none: decoupled PPO needs this weight; use truncate or mask, or algorithm=grpo"
            )


class DecoupledPPO(GroupRelative):
    """Decoupled PPO."""

    def __init__(self, config: DecoupledPPOConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip)
