"""Models with one number a token in place of the vocabulary: PPO's critic, and reward models.

Both are HF's `ForSequenceClassification` with one label. A checkpoint of a language model serves as well: its LM head
is left out, and a new value head starts as `actor.value_head_std` says.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.actor.batch.microbatch import Microbatch, shift_right
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import update_in_minibatches
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch


class ValueAlgorithm(Protocol):
    """What `MegatronPPOCritic` asks of an algorithm."""

    n_minibatches: int

    def value_loss(self, values: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a microbatch and its metrics; `values` and the tensors of `data` belong together."""

    def value_loss_weight(self, data: PackedBatch) -> Tensor:
        """The weight of that mean."""


class MegatronScalarEngine(MegatronEngine):
    """The engine with a value head. Losses see it with `train_batch(..., loss_input="values")`: `loss_fn(values, data)`.

    `values[i]` is the head's output after reading token i, and the per-token tensors of `data` are those of token
    i + 1, the one that is chosen there; at a sequence's last token, where nothing is chosen any more, they are 0.
    """

    def __init__(self, config: EngineConfig, parallel: ParallelConfig | None = None, *, trainable: bool = True) -> None:
        super().__init__(config, parallel, scalar=True, trainable=trainable)

    @torch.no_grad()
    def scores(self, data: Any) -> Tensor:
        """float32 `[num_seqs]` on the host: the head's output at each sequence's last token, a reward model's score."""

        def process(out: Tensor, mb: Microbatch) -> Tensor:
            return self._values(out, mb)[mb.batch.cu_seqlens[1:].long() - 1]

        self.eval()
        return torch.cat(self._collect(PackedBatch.from_padded(data), process))


class MegatronPPOCritic(MegatronScalarEngine):
    """PPO's critic."""

    def __init__(self, config: EngineConfig, algorithm: ValueAlgorithm, parallel: ParallelConfig | None = None) -> None:
        super().__init__(config, parallel)
        self.algorithm = algorithm

    @torch.no_grad()
    def compute_values(self, data: Any) -> Tensor:
        """float32 `[total_tokens]`, token-aligned, on the host: `values[i]` is the value of the state in which token i
        is chosen, so of what stands before it; 0 at a sequence's first token."""

        def process(out: Tensor, mb: Microbatch) -> Tensor:
            return shift_right(self._values(out, mb), mb.batch.cu_seqlens)

        self.eval()
        return torch.cat(self._collect(PackedBatch.from_padded(data), process))

    def ppo_update(self, batch: PackedBatch) -> dict[str, float]:
        """Updates the values on the batch's `values` and `returns`: see `MegatronPPOActor.ppo_update`."""
        algorithm = self.algorithm
        return update_in_minibatches(
            self, batch, algorithm.n_minibatches, algorithm.value_loss, algorithm.value_loss_weight, "values"
        )
