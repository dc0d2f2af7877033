"""Supervised training: next-token loss over the tokens that `loss_mask` marks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megarl.actor.engine import MegatronEngine
from megarl.types import PackedBatch


def lm_loss(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-prob (nats a token) over the marked tokens of a microbatch."""
    mask = data["loss_mask"].bool()
    count = mask.sum().clamp(min=1)
    loss = -logprobs.masked_fill(~mask, 0.0).sum() / count
    return loss, {"entropy": entropy.detach().masked_fill(~mask, 0.0).sum() / count}


def trained_tokens(data: PackedBatch) -> Tensor:
    """How many tokens count; a sequence's first token is predicted by nothing and never does."""
    mask = data["loss_mask"].bool().clone()
    lengths = data.lengths
    mask[data.cu_seqlens[:-1][lengths > 0].long()] = False
    return mask.sum()


class MegatronLMEngine(MegatronEngine):
    """The engine with the supervised methods of AReaL's `LMEngine`."""

    def train_lm(self, data: Any) -> dict[str, float]:
        """One step on `input_ids`, `attention_mask`, `loss_mask` (padded or packed): see `TrainEngine.train_batch`."""
        self.train()
        return self.train_batch(data, lm_loss, trained_tokens, loss_input="logprobs")

    def evaluate_lm(self, data: Any) -> dict[str, float]:
        """The same loss without a step."""
        self.eval()
        return self.eval_batch(data, lm_loss, trained_tokens, loss_input="logprobs")
