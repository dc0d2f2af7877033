"""What an RL algorithm decides: the advantage of every token, the loss, and how microbatch losses are weighted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from megarl.knobs import UserError, knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class AlgorithmConfig:
    """Knobs that every algorithm has."""

    n_minibatches: int = knob(1, "optimizer steps taken on each rollout batch, each on its own part of it")

    def check(self) -> None:
        """Refuses values that no run could use.

        Raises:
            UserError: naming the knob.
        """
        if self.n_minibatches < 1:
            raise UserError(f"algorithm.n_minibatches={self.n_minibatches} must be at least 1")


class Algorithm(ABC):
    """An algorithm, given its config. Per-token tensors are token-aligned in `advantages`; in `loss` every tensor of
    `data` is aligned with `logprobs`."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.n_minibatches = config.n_minibatches

    @abstractmethod
    def advantages(self, batch: PackedBatch) -> Tensor:
        """float32 `[total_tokens]`, zero where `loss_mask` is not set."""

    @abstractmethod
    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a microbatch and its metrics (scalars; those named `*_max` are maxima)."""

    @abstractmethod
    def loss_weight(self, data: PackedBatch) -> Tensor:
        """The weight of a microbatch's mean in the global batch."""


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` is set; 0 where it is set nowhere. Values outside the mask may be anything."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def broadcast_to_tokens(values: Tensor, batch: PackedBatch) -> Tensor:
    """One value a sequence `[num_seqs]` to its trained tokens `[total_tokens]`; zero elsewhere."""
    spread = values.repeat_interleave(batch.lengths)
    return spread.masked_fill(~batch["loss_mask"].bool(), 0.0)
