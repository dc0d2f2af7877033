"""REINFORCE (Williams, Machine Learning 8, 1992) with importance weights, and the base of its relatives.

    L = - mean over trained tokens of sg(rho_t) A_i log pi(o_t)
    A_i = r_i, with `baseline` minus the mean reward of the batch

In the first optimizer step on a batch, rho_t is 1 and this is REINFORCE. In later steps its gradient equals the
gradient of the importance-weighted estimate rho_t A_i.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.base import UNBOUNDED, RLConfig, broadcast_to_tokens
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.knobs import knob
from megarl.types import PackedBatch, trained_tokens_of_samples


@dataclass(frozen=True)
class ReinforceConfig(RLConfig):
    """Knobs of REINFORCE."""

    baseline: bool = knob(True, "subtract the mean reward of the batch")


class UnclippedPolicyGradient(PolicyGradient):
    """REINFORCE's objective. Derived algorithms differ in their advantages."""

    def __init__(self, config: RLConfig) -> None:
        super().__init__(config, clip_low=1.0, clip_high=UNBOUNDED, objective="cispo", ratio="token")


class Reinforce(UnclippedPolicyGradient):
    """REINFORCE."""

    def __init__(self, config: ReinforceConfig) -> None:
        super().__init__(config)
        self.config = config

    def advantages(self, batch: PackedBatch) -> Tensor:
        rewards = self.sequence_rewards(batch)
        if self.config.baseline:
            trained = trained_tokens_of_samples(batch) > 0
            rewards = rewards - (rewards.double()[trained].mean().float() if trained.any() else 0.0)
        return broadcast_to_tokens(rewards, batch)
