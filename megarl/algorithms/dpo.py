"""DPO: direct preference optimisation (Rafailov et al., https://arxiv.org/abs/2305.18290, equation 7).

    L = - mean over pairs of log sigmoid(beta (h(y_w) - h(y_l))),   h(y) = logp(y) - logp_ref(y)

`label_smoothing` is the assumed share of wrong labels (conservative DPO, Mitchell 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.preference import (
    PreferenceAlgorithm,
    PreferenceConfig,
    completion_logprobs,
    log_sigmoid_loss,
    pair_metrics,
    pairs,
)
from megarl.knobs import knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class DPOConfig(PreferenceConfig):
    """Knobs of DPO."""

    label_smoothing: float = knob(0.0, "assumed share of wrong labels", least=0, below=0.5)


class DPO(PreferenceAlgorithm):
    """DPO."""

    def __init__(self, config: DPOConfig) -> None:
        self.config = config

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        h = completion_logprobs(logprobs, data) - completion_logprobs(data["ref_logp"], data)
        chosen, rejected = pairs(self.config.beta * h, data)
        loss = log_sigmoid_loss(chosen - rejected, self.config.label_smoothing).mean()
        return loss, pair_metrics(chosen, rejected)
