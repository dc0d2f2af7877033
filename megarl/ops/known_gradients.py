"""Log-probs from hidden states, whose gradients a function tells as soon as a chunk's values are there.

The caller of `linear_logprobs` knows the loss's gradients after the whole forward pass, so backward computes the logits
again: 8 T*H*V operations. If the gradients at a token depend on no other token's log-prob or entropy, they can be had
chunk by chunk, while the logits are in memory: 6 T*H*V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.linear_logprob import linear_token_loss
from megarl.ops.native import values_checked

# Takes log-probs `[rows]`, entropies `[rows]` and positions of a chunk. Returns the loss's gradients of the first two.
TokenGradients = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

DIFFERENCE = 1e-4  # of gradients that backward gets and those told, as a share of the largest: far above rounding


def logprobs_of_token_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, gradients: TokenGradients, *, rows: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Computes log-probs and entropies as `linear_logprobs` does, and in the same pass all that backward returns.

    `gradients` is called once per chunk. Backward compares what it gets with what was told. The results have the bits
    of `linear_logprobs`, and so have the gradients where the function tells the same bits that backward gets.

    Args:
        rows: int64, the positions with a label.
        options: of `linear_token_loss`, without `loss_grad` and `with_entropy`.

    Raises:
        RuntimeError: in backward, gradients differ from those told: they depend on other tokens. On a GPU
            the device itself stops, so that nothing waits.
    """
    told: list[Tensor] = []

    def linearised(logprobs: Tensor, entropy: Tensor | None, positions: Tensor) -> Tensor:
        assert entropy is not None
        of_logprobs, of_entropy = gradients(logprobs.detach(), entropy.detach(), positions)
        told.append(torch.stack((of_logprobs, of_entropy)))
        return of_logprobs * logprobs + of_entropy * entropy

    loss, logprobs, entropy = linear_token_loss(
        hidden, weight, labels, linearised, rows=rows, with_entropy=True, loss_grad=1.0, **options
    )
    if not torch.is_grad_enabled() or not told:
        assert entropy is not None
        return logprobs, entropy
    results: tuple[Tensor, Tensor] = _KnownGradients.apply(loss, logprobs, entropy, rows, torch.cat(told, 1))
    return results


class _KnownGradients(torch.autograd.Function):
    """Log-probs and entropies whose backward pass runs `loss`'s, after a look at the gradients that it gets."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, logprobs: Tensor, entropy: Tensor, rows: Tensor, told: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, told)
        return logprobs.view_as(logprobs), entropy.view_as(entropy)

    @staticmethod
    @first_derivative_only("logprobs_of_token_loss", "megarl.ops.torch_twins.linear_logprobs")
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        rows, told = ctx.saved_tensors
        difference = (torch.stack((of_logprobs[rows], of_entropy[rows])) - told).abs().amax()
        largest = told.abs().amax()
        parted = difference > DIFFERENCE * largest  # never true of NaN, which the engine finds in the gradients
        rule = "the head took gradients that the loss does not have, which depend on other tokens"
        if values_checked(parted) and parted:
            raise RuntimeError(
                f"{rule}, by {float(difference):.2g} where the largest is {float(largest):.2g}; its algorithm's "
                "`by_token` must return False"
            )
        if parted.device.type == "cuda" and not is_fake(parted):
            torch._assert_async(~parted, f"{rule}; its algorithm's `by_token` must return False")
        return told.new_ones(()), None, None, None, None
