"""A reward model from preferences (Bradley and Terry 1952; Ouyang et al., https://arxiv.org/abs/2203.02155, eq. 1).

A scalar head gives the score s(y) of each completion at its last token:

    L = - mean over pairs of log sigmoid(s(y_w) - s(y_l))  +  center_coef (s(y_w) + s(y_l))^2

The second term keeps the scores near 0 (Eisenstein et al., https://arxiv.org/abs/2312.09244).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import AlgorithmConfig
from megarl.algorithms.preference import log_sigmoid_loss, pair_metrics, pairs
from megarl.knobs import MAX_WEIGHT, knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class RewardModelConfig(AlgorithmConfig):
    """Knobs of the reward model."""

    center_coef: float = knob(0.0, "weight of the squared sum of a pair's scores", least=0, most=MAX_WEIGHT)
    label_smoothing: float = knob(0.0, "assumed share of wrong labels", least=0, below=0.5)


class RewardModel:
    """Loss of a reward model, on the values of a scalar head."""

    needs_reference = False
    paired = True

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config

    def loss(self, values: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of a microbatch and its metrics; `values` `[tokens]` are token-aligned."""
        scores = values[data.cu_seqlens[1:].long() - 1]
        chosen, rejected = pairs(scores, data)
        loss = log_sigmoid_loss(chosen - rejected, self.config.label_smoothing).mean()
        loss = loss + self.config.center_coef * (chosen + rejected).square().mean()
        return loss, pair_metrics(chosen, rejected)

    def loss_weight(self, data: PackedBatch) -> Tensor:
        """Returns the weight of that mean: the number of pairs."""
        return torch.tensor(data.num_seqs / 2)
