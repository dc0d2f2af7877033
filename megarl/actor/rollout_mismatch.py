"""Measures how far the trainer's policy is from the one that sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.types import TEACHER_SAMPLED, PackedBatch


def rollout_mismatch(batch: PackedBatch, version: int) -> dict[str, float]:
    """Compares the log-probs of rollout and trainer on trained tokens. With d = trainer - rollout in nats and w = e^d:

    | Metric | Meaning |
    |---|---|
    | `rollout_kl_k1` | mean of -d, Schulman's estimate k1 of KL(rollout, trainer) |
    | `rollout_kl` | mean of w - 1 - d, his estimate k3 |
    | `rollout_chi2` | mean of w^2 - 1 |
    | `rollout_ess` | (sum w)^2 / (n sum w^2) of the n tokens: the effective share of tokens under weights w |
    | `rollout_ess_sequences` | the effective share of sequences, each weighted by the product of its tokens' w |
    | `logprob_diff_mean`, `logprob_diff_max` | mean and largest abs(d) of tokens sampled from `version` |

    The last two are omitted if there are no such tokens. They show how the two engines differ on the same weights.
    """
    mask = batch["loss_mask"].bool()
    if TEACHER_SAMPLED in batch:  # the policy sampled none of those sequences' tokens
        mask = mask & ~torch.repeat_interleave(batch[TEACHER_SAMPLED].bool(), batch.lengths)
    difference = (batch["prox_logp"] - batch["rollout_logprobs"]).double()
    trained = difference[mask]
    owners = torch.repeat_interleave(torch.arange(batch.num_seqs), batch.lengths)[mask]
    if not trained.numel():
        return {"rollout_kl": 0.0}
    products = torch.zeros(batch.num_seqs, dtype=torch.float64).index_add_(0, owners, trained)[owners.unique()]
    metrics = {
        "rollout_kl_k1": float(-trained.mean()),
        "rollout_kl": float((torch.expm1(trained) - trained).mean()),
        "rollout_chi2": float(torch.expm1(2 * trained).mean()),
        "rollout_ess": _effective_share(trained),
        "rollout_ess_sequences": _effective_share(products),
    }
    on_policy = mask & (batch["versions"] == version) if "versions" in batch else mask
    if on_policy.any():
        gap = difference[on_policy].abs()
        metrics |= {"logprob_diff_mean": float(gap.mean()), "logprob_diff_max": float(gap.max())}
    return metrics


def _effective_share(log_weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of n weights, given their logs. 1 if all are equal, 1/n if one outweighs the others."""
    sums = [torch.logsumexp(power * log_weights, 0) for power in (1, 2)]
    return float((2 * sums[0] - sums[1]).exp() / log_weights.numel())
