"""Base of the offline methods: losses over whole completions, in pairs or with one label each.

A batch of pairs holds chosen_0, rejected_0, chosen_1, rejected_1, ...; a microbatch never splits a pair. logp(y) is the
sum of log pi over the completion's tokens. h(y) = logp(y) - logp_ref(y); beta h(y) is DPO's implicit reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.base import AlgorithmConfig, trained_tokens
from megarl.knobs import MAX_WEIGHT, knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class PreferenceConfig(AlgorithmConfig):
    """Knobs of every method on preferences."""

    beta: float = knob(
        0.1,
        "strength of the preferences; in DPO and KTO, strength of the pull to the reference",
        above=0,
        most=MAX_WEIGHT,
    )


class PreferenceAlgorithm(ABC):
    """Base class of methods on preferences. In `loss` every tensor of `data` is aligned with `logprobs`."""

    needs_reference = True  # True if `loss` reads `ref_logp`
    paired = True  # True if sequences alternate between chosen and rejected

    @abstractmethod
    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of a microbatch and its metrics."""

    def loss_weight(self, data: PackedBatch) -> Tensor:
        """Returns the weight of that mean: the number of pairs, or of sequences."""
        return torch.tensor(data.num_seqs / 2 if self.paired else data.num_seqs)


def completion_logprobs(logprobs: Tensor, data: PackedBatch) -> Tensor:
    """Computes logp(y) of every completion, float32 `[num_seqs]`, differentiable."""
    masked = logprobs.masked_fill(~data["loss_mask"].bool(), 0.0)
    return torch.stack([part.sum() for part in data.split(masked)])


def completion_lengths(data: PackedBatch) -> Tensor:
    """Counts the tokens of every completion, float32 `[num_seqs]`, at least 1."""
    return trained_tokens(data).clamp(min=1).to(data["loss_mask"].device)


def pairs(values: Tensor, data: PackedBatch) -> tuple[Tensor, Tensor]:
    """Splits values `[num_seqs]` into chosen and rejected completions, `[pairs]` each, in the batch's order.

    Half of the sequences are chosen, so a sort does what masks would, and no size is read from the device.
    """
    order = torch.sort(data["is_chosen"].bool().logical_not(), stable=True).indices
    chosen, rejected = values[order].split(data.num_seqs // 2)
    return chosen, rejected


def log_sigmoid_loss(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Computes -(1 - e) log sigmoid(margin) - e log sigmoid(-margin), where e is the assumed share of wrong labels."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Metrics of the rewards `[pairs]` of every paired method: means, margin and accuracy.

    Accuracy is the share of pairs in order. A tie counts one half, so a policy equal to its reference has 0.5.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "reward_chosen": chosen.mean(),
        "reward_rejected": rejected.mean(),
        "margin": (chosen - rejected).mean(),
        "accuracy": (0.5 + 0.5 * (chosen - rejected).sign()).mean(),
    }
