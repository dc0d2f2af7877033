"""SimPO: simple preference optimisation (Meng et al., https://arxiv.org/abs/2405.14734, equation 6).

The reward of a completion is beta times its mean log-prob. No reference policy is needed:

    L = - mean over pairs of log sigmoid(beta/|y_w| logp(y_w) - beta/|y_l| logp(y_l) - gamma)

`cpo_alpha` is the weight of an added negative log-likelihood of the chosen completion (CPO-SimPO; Xu et al.,
https://arxiv.org/abs/2401.08417).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.preference import (
    PreferenceAlgorithm,
    PreferenceConfig,
    completion_lengths,
    completion_logprobs,
    log_sigmoid_loss,
    pair_metrics,
    pairs,
)
from megarl.knobs import MAX_WEIGHT, knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class SimPOConfig(PreferenceConfig):
    """Knobs of SimPO."""

    beta: float = knob(2.0, "scale of the mean log-probs", above=0, most=MAX_WEIGHT)
    gamma: float = knob(0.5, "target margin of the chosen over the rejected completion", least=0, most=MAX_WEIGHT)
    cpo_alpha: float = knob(0.0, "weight of the chosen completion's negative log-likelihood", least=0, most=MAX_WEIGHT)
    label_smoothing: float = knob(0.0, "assumed share of wrong labels", least=0, below=0.5)


class SimPO(PreferenceAlgorithm):
    """SimPO."""

    needs_reference = False

    def __init__(self, config: SimPOConfig) -> None:
        self.config = config

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mean_logp = completion_logprobs(logprobs, data) / completion_lengths(data)
        chosen, rejected = pairs(self.config.beta * mean_logp, data)
        loss = log_sigmoid_loss(chosen - rejected - self.config.gamma, self.config.label_smoothing).mean()
        metrics = pair_metrics(chosen, rejected)
        if self.config.cpo_alpha > 0:
            nll = -pairs(mean_logp, data)[0].mean()
            loss = loss + self.config.cpo_alpha * nll
            metrics["nll"] = nll.detach()
        return loss, metrics
