"""GRPO: group-relative policy optimisation (Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1).

For prompt q with completions o_1..o_G and rewards r_1..r_G:

    A_i   = (r_i - mean(r)) / (std(r) + eps)                          the same for every token of o_i
    rho_t = pi(o_t) / pi_prox(o_t)
    L     = - mean over trained tokens of min(rho_t A_i, clip(rho_t, 1 - eps_clip, 1 + eps_clip) A_i)

The mean runs over all trained tokens of the global batch (the paper's runs over each completion first).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import Algorithm, AlgorithmConfig, broadcast_to_tokens, masked_mean
from megarl.knobs import UserError, knob
from megarl.ops.advantage import group_advantage
from megarl.types import PackedBatch


@dataclass(frozen=True)
class GRPOConfig(AlgorithmConfig):
    """Knobs of GRPO."""

    eps_clip: float = knob(0.2, "the ratio to the proximal policy is clipped to 1 - eps_clip .. 1 + eps_clip")
    advantage_eps: float = knob(1e-6, "added to the standard deviation of a group's rewards")

    def check(self) -> None:
        super().check()
        if not 0 < self.eps_clip < 1:
            raise UserError(f"algorithm.eps_clip={self.eps_clip} must lie between 0 and 1")


class GRPO(Algorithm):
    """Reads `rewards` and `group_ids` `[num_seqs]`, `loss_mask` and `prox_logp` `[total_tokens]`."""

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        self.config = config

    def advantages(self, batch: PackedBatch) -> Tensor:
        per_sequence = group_advantage(
            batch["rewards"].float(), batch["group_ids"], mode="mean_std", eps=self.config.advantage_eps
        )
        return broadcast_to_tokens(per_sequence, batch)

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask = data["loss_mask"].bool()
        advantages, low, high = data["advantages"], 1 - self.config.eps_clip, 1 + self.config.eps_clip
        log_ratio = (logprobs - data["prox_logp"]).masked_fill(~mask, 0.0)
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        with torch.no_grad():
            clipped = (ratio * advantages > ratio.clamp(low, high) * advantages).float()
            metrics = {
                "clip_fraction": masked_mean(clipped, mask),
                "approx_kl": masked_mean(ratio - 1 - log_ratio, mask),
                "entropy": masked_mean(entropy, mask),
                "ratio_max": ratio.masked_fill(~mask, 0.0).max(),
            }
        return -masked_mean(surrogate, mask), metrics

    def loss_weight(self, data: PackedBatch) -> Tensor:
        return data["loss_mask"].sum()
