"""IPO: identity preference optimisation (Azar et al., https://arxiv.org/abs/2310.12036, equation 17).

    L = mean over pairs of (h(y_w) - h(y_l) - 1 / (2 beta))^2,   h(y) = logp(y) - logp_ref(y)

`length_average` divides h by the completion's length. The authors advise it for completions of unequal length, and
TRL does it. Without it, h is the paper's sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.preference import (
    PreferenceAlgorithm,
    PreferenceConfig,
    completion_lengths,
    completion_logprobs,
    pair_metrics,
    pairs,
)
from megarl.knobs import knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class IPOConfig(PreferenceConfig):
    """Knobs of IPO."""

    length_average: bool = knob(True, "divide log-ratios by the completion's length")


class IPO(PreferenceAlgorithm):
    """IPO."""

    def __init__(self, config: IPOConfig) -> None:
        self.config = config

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        h = completion_logprobs(logprobs, data) - completion_logprobs(data["ref_logp"], data)
        if self.config.length_average:
            h = h / completion_lengths(data)
        chosen, rejected = pairs(h, data)
        loss = (chosen - rejected - 1 / (2 * self.config.beta)).square().mean()
        return loss, pair_metrics(self.config.beta * chosen, self.config.beta * rejected)
