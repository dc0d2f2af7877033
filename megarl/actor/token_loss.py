"""Log-probs for a loss whose gradient at a token depends on no other token's log-prob or entropy.

Where the engine does not keep the logits, its LM head takes the loss's gradients chunk by chunk, while a chunk's logits
are in memory. So it computes logits once. The loss's value and metrics come from the complete microbatch, as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.actor.api import LossFn
from megarl.actor.batch.microbatch import Microbatch
from megarl.actor.engine import MegatronEngine
from megarl.types import PackedBatch


class TokenLoss:
    """Log-probs and entropies of trained tokens, whose gradients the head knows at once. A `LossSource`."""

    def __init__(self, engine: MegatronEngine, loss_fn: LossFn) -> None:
        """Takes the loss of a microbatch. It may change no state, because each chunk calls it."""
        self.engine, self.loss_fn = engine, loss_fn

    def prepare(self, batch: PackedBatch, microbatches: Sequence[Microbatch]) -> None:
        """Needs nothing."""

    def __call__(self, output: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        gradients = functools.partial(self._gradients, microbatch)
        logprobs, entropy = self.engine._logprobs(output, microbatch, microbatch.trained_labels, gradients=gradients)
        assert entropy is not None
        return logprobs, entropy

    def _gradients(self, mb: Microbatch, logprobs: Tensor, entropy: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """Computes the loss's gradients of a chunk, at `rows` of this rank's tokens. Other tokens' values are 0."""
        at = rows if mb.local is None else mb.local.source[rows]
        data = PackedBatch(mb.aligned.cu_seqlens, mb.aligned.tokens, mb.aligned.sequences, mb.aligned.bounds)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (logprobs, entropy)]
            complete = (x.new_zeros(data.total_tokens).index_put((at,), x) for x in leaves)
            result = self.loss_fn(*complete, data)
            loss = (result[0] if isinstance(result, tuple) else result) * mb.weight
        of_logprobs, of_entropy = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return of_logprobs, of_entropy
