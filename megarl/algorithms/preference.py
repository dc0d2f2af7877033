"""What the offline methods share: losses over whole completions, of pairs or of single judged ones.

A batch of pairs holds chosen_0, rejected_0, chosen_1, rejected_1, ...; the engine never parts a pair. With
logp(y) = sum over the completion's tokens of log pi, h(y) = logp(y) - logp_ref(y) is what DPO calls the implicit reward
over beta.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.base import AlgorithmConfig, trained_tokens
from megarl.knobs import UserError, knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class PreferenceConfig(AlgorithmConfig):
    """Knobs that every method on preferences has."""

    beta: float = knob(0.1, "how strongly preferences pull; in DPO and KTO the price of leaving the reference")

    def check(self) -> None:
        if not self.beta > 0:
            raise UserError(f"algorithm.beta={self.beta} must be above 0")


class PreferenceAlgorithm(ABC):
    """A method on preferences, given its config. In `loss` every tensor of `data` is aligned with `logprobs`."""

    needs_reference = True  # whether `loss` reads `ref_logp`
    paired = True  # whether sequences come as chosen, rejected

    @abstractmethod
    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a microbatch and its metrics."""

    def loss_weight(self, data: PackedBatch) -> Tensor:
        """The weight of that mean: its pairs, or its sequences."""
        return torch.tensor(data.num_seqs / 2 if self.paired else data.num_seqs)


def completion_logprobs(logprobs: Tensor, data: PackedBatch) -> Tensor:
    """float32 `[num_seqs]`: logp(y) of every completion, differentiable."""
    kept = logprobs.masked_fill(~data["loss_mask"].bool(), 0.0)
    return torch.stack([part.sum() for part in kept.split(data.lengths.tolist())])


def completion_lengths(data: PackedBatch) -> Tensor:
    """float32 `[num_seqs]`: tokens of every completion, at least 1."""
    return trained_tokens(data).clamp(min=1).to(data["loss_mask"].device)


def pairs(values: Tensor, data: PackedBatch) -> tuple[Tensor, Tensor]:
    """Values `[num_seqs]` of the chosen and of the rejected completions, `[pairs]` each."""
    chosen = data["is_chosen"].bool()
    return values[chosen], values[~chosen]


def log_sigmoid_loss(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(margin) - e log sigmoid(-margin), with e the share of labels held to be wrong."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """What every method on pairs reports of its rewards `[pairs]`: their means, margin and the share in order, of
    which ties are half: a policy equal to its reference is at a half, too."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "reward_chosen": chosen.mean(),
        "reward_rejected": rejected.mean(),
        "margin": (chosen - rejected).mean(),
        "accuracy": (0.5 + 0.5 * (chosen - rejected).sign()).mean(),
    }


def check_label_smoothing(value: float) -> None:
    """Refuses a share of wrong labels at which nothing could be learned."""
    if not 0 <= value < 0.5:
        raise UserError(f"algorithm.label_smoothing={value} must lie in [0, 0.5)")
