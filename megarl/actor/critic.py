"""Models with one output per token instead of the vocabulary: PPO's critic, and reward models.

Both are HF's `ForSequenceClassification` with one label. A language model's checkpoint works as well. Its LM head is
skipped, and a new value head is drawn with standard deviation `actor.value_head_std`.
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
    """Methods of an algorithm that `MegatronPPOCritic` calls."""

    n_minibatches: int

    def value_loss(self, values: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of a microbatch and its metrics. Entries i of `values` and of the tensors of `data` match."""

    def value_loss_weight(self, data: PackedBatch) -> Tensor:
        """Weight of the microbatch's mean loss."""


class MegatronScalarEngine(MegatronEngine):
    """The engine with a value head. `train_batch(..., loss_input="values")` calls `loss_fn(values, data)`.

    `values[i]` is the head's output after reading token i. Entry i of the per-token tensors of `data` belongs to token
    i + 1, the action chosen in that state. At a sequence's last token, which has no next action, these tensors are 0.
    """

    def __init__(self, config: EngineConfig, parallel: ParallelConfig | None = None, *, trainable: bool = True) -> None:
        super().__init__(config, parallel, scalar=True, trainable=trainable)

    @torch.no_grad()
    def scores(self, data: Any) -> Tensor:
        """Computes a reward model's scores, float32 `[num_seqs]`, on the host: the head's output at last tokens."""

        def process(out: Tensor, mb: Microbatch) -> Tensor:
            return self._values(out, mb)[mb.batch.cu_seqlens[1:].long() - 1]

        self.eval()
        return torch.cat(self._collect(data, process))


class MegatronPPOCritic(MegatronScalarEngine):
    """PPO's critic."""

    def __init__(self, config: EngineConfig, algorithm: ValueAlgorithm, parallel: ParallelConfig | None = None) -> None:
        super().__init__(config, parallel)
        self.algorithm = algorithm

    @torch.no_grad()
    def compute_values(self, data: Any) -> Tensor:
        """Computes values, float32 `[total_tokens]`, token-aligned, on the host.

        `values[i]` is V(s) before token i: the value of the state in which token i is chosen. It is 0 at a sequence's
        first token.
        """

        def process(out: Tensor, mb: Microbatch) -> Tensor:
            return shift_right(self._values(out, mb), mb.last)

        self.eval()
        return torch.cat(self._collect(data, process))

    def ppo_update(self, batch: PackedBatch) -> dict[str, float]:
        """Updates the critic on the batch's `values` and `returns`; see `MegatronPPOActor.ppo_update`."""
        algorithm = self.algorithm
        return update_in_minibatches(
            self, batch, algorithm.n_minibatches, algorithm.value_loss, algorithm.value_loss_weight, "values"
        )
