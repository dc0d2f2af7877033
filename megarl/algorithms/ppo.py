"""PPO with a critic (Schulman et al., https://arxiv.org/abs/1707.06347) and GAE (https://arxiv.org/abs/1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = sum_l (gamma lambda)^l delta_{t+l},    R_t = A_t + V_t
    L_pi    = - mean of min(rho_t A_t, clip(rho_t, 1 - eps_clip, 1 + eps_clip) A_t)
    L_V     = mean of 1/2 max((V - R_t)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R_t)^2)

r_t is the reward at the last token. With `kl_in=reward` the KL to the reference is subtracted at every token.
Advantages are normalised to mean 0 and variance 1 over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import KL_PLACES, UNBOUNDED, ClipConfig, sample_cu_seqlens, token_weights
from megarl.algorithms.kl_penalty import KL_ESTIMATORS
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.knobs import knob
from megarl.ops.advantage import gae_packed, whiten
from megarl.types import PackedBatch


@dataclass(frozen=True)
class PPOConfig(ClipConfig):
    """Knobs of PPO."""

    kl_in: str = knob("reward", "where the KL to the reference is applied: loss or reward", choices=KL_PLACES)
    kl_estimator: str = knob(
        "k1", "estimator of the KL to the reference: k1, k2 or k3 (Schulman)", choices=KL_ESTIMATORS
    )
    dual_clip: float | None = knob(
        None, "bound on the loss for a negative advantage, as a multiple of it; above 1", above=1, most=UNBOUNDED
    )
    gamma: float = knob(1.0, "discount of later rewards, per token", least=0, most=1)
    gae_lambda: float = knob(0.95, "lambda of generalised advantage estimation", least=0, most=1)
    value_clip: float = knob(
        0.2, "the critic's new value is clipped to this distance from its old one", above=0, most=UNBOUNDED
    )


class PPO(PolicyGradient):
    """PPO. `advantages` also reads `values`, and sets `returns` `[total_tokens]` for the critic."""

    needs_critic = True

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(
            config,
            clip_low=config.eps_clip,
            clip_high=config.eps_clip,
            objective="clip",
            ratio="token",
            dual_clip=config.dual_clip,
        )
        self.config = config

    def advantages(self, batch: PackedBatch) -> Tensor:
        mask = batch["loss_mask"].bool()
        advantages, returns = gae_packed(
            self.token_rewards(batch),
            batch["values"],
            mask,
            sample_cu_seqlens(batch),
            gamma=self.config.gamma,
            lam=self.config.gae_lambda,
        )
        batch.set_tokens("returns", returns)
        return whiten(advantages, mask)

    def value_loss(self, values: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the critic's mean loss on a microbatch and its metrics; `data` is aligned with `values`."""
        mask, old, returns = data["loss_mask"].bool(), data["values"], data["returns"]
        bound = self.config.value_clip
        clamped = torch.clamp(values, old - bound, old + bound)
        loss = 0.5 * torch.maximum((values - returns).square(), (clamped - returns).square()).masked_fill(~mask, 0.0)
        weights = token_weights(data, "token")
        with torch.no_grad():
            clipped = ((clamped - returns).square() > (values - returns).square()) & mask
            metrics = {
                "value_clip_fraction": (clipped * weights).sum(),
                "value": (values.masked_fill(~mask, 0.0) * weights).sum(),
            }
        return (loss * weights).sum(), metrics

    def value_loss_weight(self, data: PackedBatch) -> Tensor:
        """Returns the weight of the critic's mean loss."""
        return data["loss_mask"].sum()
