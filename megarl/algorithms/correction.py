"""Corrections from the policy that sampled to the proximal policy, beyond a weight for each token.

The fused loss weights a token by `w_t = pi_prox(o_t) / pi_rollout(o_t)`. With `correction_level` a whole sequence of n
trained tokens has one weight:

    token       w_t
    sequence    w_1 w_2 ... w_n            unbiased, and its variance grows with n
    geometric   (w_1 w_2 ... w_n)^(1/n)    independent of length

Sequences can be left out of the policy loss too. One reason is a token that the trainer finds far less likely
(`w_t < correction_veto`). The other is a geometric mean outside `reject_low` to `reject_high`. They still count in the
loss's denominators, and in its KL and entropy. Of a conversation in segments, each segment is a sequence.

Levels and rejection follow "When Speed Kills Stability" (Liu et al., https://richardli.xyz/rl-collapse) and
verl's rollout correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.ops.loss import segment_sum
from megarl.types import PackedBatch

LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class SequenceCorrection:
    """Weights of whole sequences, and sequences that are left out."""

    level: str
    veto: float
    reject_low: float
    reject_high: float

    @property
    def rejects(self) -> bool:
        return self.veto > 0 or self.reject_low > 0 or self.reject_high > 0

    def rollout_logprobs(self, prox_logp: Tensor, data: PackedBatch) -> Tensor:
        """Returns log-probs whose token weights are the sequences' weights, `[total_tokens]`."""
        if self.level == "token":
            return data["rollout_logprobs"]
        sums = self._sums(prox_logp, data)
        log_weights = sums[:, 0] if self.level == "sequence" else sums[:, 0] / sums[:, 1].clamp(min=1)
        return prox_logp - _spread(log_weights.to(prox_logp.dtype), data)

    def kept(self, prox_logp: Tensor, data: PackedBatch) -> Tensor:
        """Returns False for tokens of sequences that are left out, bool `[total_tokens]`."""
        mask = data["loss_mask"].bool()
        sums = self._sums(prox_logp, data)
        kept = torch.ones(data.num_seqs, dtype=torch.bool, device=mask.device)
        if self.veto > 0:
            vanishing = prox_logp - data["rollout_logprobs"] < math.log(self.veto)
            kept &= segment_sum(vanishing.to(prox_logp.dtype), mask, data.cu_seqlens)[:, 0] == 0
        mean_weight = (sums[:, 0] / sums[:, 1].clamp(min=1)).exp()
        if self.reject_low > 0:
            kept &= mean_weight >= self.reject_low
        if self.reject_high > 0:
            kept &= mean_weight <= self.reject_high
        return _spread(kept, data)

    def _sums(self, prox_logp: Tensor, data: PackedBatch) -> Tensor:
        """Sum and count of each sequence's log weights, float64 `[num_seqs, 2]`."""
        return segment_sum(prox_logp - data["rollout_logprobs"], data["loss_mask"].bool(), data.cu_seqlens)


def _spread(values: Tensor, data: PackedBatch) -> Tensor:
    """Repeats a value of each sequence for its tokens."""
    return torch.repeat_interleave(values, data.cu_seqlens.diff().long(), output_size=data.total_tokens)
