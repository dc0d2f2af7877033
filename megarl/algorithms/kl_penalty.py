"""KL penalty against the reference policy: the estimators of `algorithm.kl_estimator`.

With r = log pi_ref - log pi, at a token sampled from pi (Schulman, http://joschu.net/blog/kl-approx.html):

    k1 = -r    k2 = r^2 / 2    k3 = exp(r) - 1 - r

`algorithm.kl_in=loss` adds the penalty to the loss of each token: the fused kernel computes it, with its gradient
(`csrc/loss/policy_loss_math.h`). `kl_in=reward` subtracts it from the rewards: `kl_to_reference`, here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.types import PackedBatch

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_to_reference(batch: PackedBatch, estimator: str) -> Tensor:
    """Estimates KL(policy || reference) at each trained token, float32 `[total_tokens]`; 0 elsewhere."""
    r = (batch["ref_logp"] - batch["prox_logp"]).masked_fill(~batch["loss_mask"].bool(), 0.0)
    if estimator == "k1":
        return -r
    return r.square() / 2 if estimator == "k2" else torch.expm1(r) - r
