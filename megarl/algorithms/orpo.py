"""ORPO: odds-ratio preference optimisation (Hong et al., https://arxiv.org/abs/2403.07691, equations 6 and 7).

No reference policy. With p(y) = exp(1/|y| logp(y)) and odds(y) = p(y) / (1 - p(y)):

    L = mean over pairs of  - 1/|y_w| logp(y_w)  -  alpha log sigmoid(log odds(y_w) - log odds(y_l))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.base import AlgorithmConfig
from megarl.algorithms.preference import (
    PreferenceAlgorithm,
    completion_lengths,
    completion_logprobs,
    pair_metrics,
    pairs,
)
from megarl.knobs import MAX_WEIGHT, knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class ORPOConfig(AlgorithmConfig):
    """Knobs of ORPO."""

    alpha: float = knob(
        0.1,
        "weight of the odds ratio relative to the chosen completion's likelihood; without it use method=sft",
        above=0,
        most=MAX_WEIGHT,
    )


class ORPO(PreferenceAlgorithm):
    """ORPO."""

    needs_reference = False

    def __init__(self, config: ORPOConfig) -> None:
        self.config = config

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mean_logp = completion_logprobs(logprobs, data) / completion_lengths(data)
        chosen, rejected = pairs(mean_logp, data)
        log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
        odds_loss = -F.logsigmoid(log_odds).mean()
        nll = -chosen.mean()
        metrics = pair_metrics(self.config.alpha * chosen, self.config.alpha * rejected)
        metrics.update(nll=nll.detach(), odds_loss=odds_loss.detach(), log_odds=log_odds.detach().mean())
        return nll + self.config.alpha * odds_loss, metrics


def log1mexp(x: Tensor) -> Tensor:
    """Computes log(1 - e^x) for x <= 0, by log(-expm1(x)) near 0 and log1p(-e^x) far from it (Maechler 2012).

    x is clamped to at most -1e-6, so a completion with probability 1 has finite odds.
    """
    x = x.clamp(max=-1e-6)
    near = x > -0.6931
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )
