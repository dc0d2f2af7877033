"""KTO: Kahneman-Tversky optimisation (Ethayarajh et al., https://arxiv.org/abs/2402.01306, equation 8).

Each completion has a label, desirable or undesirable. With h(y) = logp(y) - logp_ref(y):

    L = mean of  desirable_weight   (1 - sigmoid(beta (h(y) - z)))        for desirable y
                 undesirable_weight (1 - sigmoid(beta (z - h(y))))        for undesirable y
    z = max(0, mean over the batch of h(y')),   y' a completion of another prompt

z estimates KL(policy || reference) and has no gradient. The trainer computes it once over the global batch (`kto_kl`
`[num_seqs]`, one value repeated), so it does not depend on the layout. The trainer also provides
`kto_desirable_share`, the share of desirable completions in the global batch. With it, a microbatch can report its part
of a mean over one label.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.preference import PreferenceAlgorithm, PreferenceConfig, completion_logprobs
from megarl.knobs import MAX_WEIGHT, knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class KTOConfig(PreferenceConfig):
    """Knobs of KTO."""

    desirable_weight: float = knob(1.0, "weight of desirable completions", above=0, most=MAX_WEIGHT)
    undesirable_weight: float = knob(1.0, "weight of undesirable completions", above=0, most=MAX_WEIGHT)


class KTO(PreferenceAlgorithm):
    """KTO. Reads `kto_label`, `kto_kl` and `kto_desirable_share` `[num_seqs]`."""

    paired = False

    def __init__(self, config: KTOConfig) -> None:
        self.config = config

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        h = completion_logprobs(logprobs, data) - completion_logprobs(data["ref_logp"], data)
        desirable, beta = data["kto_label"].bool(), self.config.beta
        z = data["kto_kl"].to(h.dtype)
        weight = torch.where(desirable, self.config.desirable_weight, self.config.undesirable_weight)
        loss = (weight * (1 - torch.sigmoid(torch.where(desirable, h - z, z - h) * beta))).mean()
        reward, share = (beta * h).detach(), data["kto_desirable_share"].to(h.dtype)
        # Weighted by their sequences and averaged over microbatches, these give the mean over each label.
        good = (reward * desirable / share.clamp(min=1e-9)).mean()
        bad = (reward * ~desirable / (1 - share).clamp(min=1e-9)).mean()
        return loss, {
            "reward_desirable": good,
            "reward_undesirable": bad,
            "margin": good - bad,
            "accuracy": ((reward > beta * z) == desirable).float().mean(),  # share on the right side of z
            "kl": z.mean(),
        }


def mismatched_kl(logprobs: Tensor, ref_logprobs: Tensor, data: PackedBatch) -> float:
    """Computes z from completions paired with other prompts; both log-probs are token-aligned."""
    h = completion_logprobs(logprobs, data) - completion_logprobs(ref_logprobs, data)
    return max(0.0, float(h.double().mean()))
