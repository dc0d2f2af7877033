"""Supervised training: next-token loss over the tokens in `loss_mask`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megarl.actor.engine import MegatronEngine
from megarl.actor.token_loss import TokenLoss
from megarl.knobs import UserError
from megarl.types import PackedBatch


def lm_loss(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-prob (nats per token) over the tokens of a microbatch in `loss_mask`."""
    mask = data["loss_mask"].bool()
    count = mask.sum().clamp(min=1)
    loss = -logprobs.masked_fill(~mask, 0.0).sum() / count
    return loss, {"entropy": entropy.detach().masked_fill(~mask, 0.0).sum() / count}


def trained_tokens(data: PackedBatch) -> Tensor:
    """Counts trained tokens. A sequence's first token has no prediction and never counts."""
    mask = data["loss_mask"].bool().clone()
    lengths = data.lengths
    mask[data.cu_seqlens[:-1][lengths > 0].long()] = False
    return mask.sum()


def _check_keys(method: str, data: Any) -> None:
    """Refuses a batch without `loss_mask`, and a padded one without `attention_mask`."""
    remedies = {
        "attention_mask": "pad_sequences_to_tensors adds it, True on tokens and False on padding",
        "loss_mask": "mark the tokens to train with 1, those of the prompt with 0",
    }
    if isinstance(data, PackedBatch):  # without padding
        del remedies["attention_mask"]
    if missing := [key for key in remedies if key not in data]:
        raise UserError(
            f"{method} needs {' and '.join(missing)}, the batch has {', '.join(sorted(data.keys())) or 'no key'}; "
            + "; ".join(f"{key}: {remedies[key]}" for key in missing)
        )


class MegatronLMEngine(MegatronEngine):
    """The engine with the supervised methods of AReaL's `LMEngine`."""

    def train_lm(self, data: Any) -> dict[str, float]:
        """Takes one step on `input_ids`, `attention_mask`, `loss_mask`, padded or packed.

        See `TrainEngine.train_batch`.

        Raises:
            UserError: the batch lacks one of them.
        """
        _check_keys("train_lm", data)
        self.train()
        return self.train_batch(data, lm_loss, trained_tokens, loss_input=TokenLoss(self, lm_loss))

    def evaluate_lm(self, data: Any) -> dict[str, float]:
        """Computes the loss of `train_lm` without a step."""
        _check_keys("evaluate_lm", data)
        self.eval()
        return self.eval_batch(data, lm_loss, trained_tokens, loss_input="logprobs")
