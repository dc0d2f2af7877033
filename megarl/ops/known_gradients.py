"""Log-probs from hidden states, with the loss's gradients given chunk by chunk, while the logits are in memory.

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

# Takes log-probs `[rows]`, entropies `[rows]` or None, and positions of a chunk. Returns the loss's gradients of the
# log-probs, and of the entropies where there are some.
TokenGradients = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, ...]]

DIFFERENCE = 1e-4  # between gradients of backward and given ones, relative to the largest: far above rounding


def logprobs_of_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    gradients: TokenGradients,
    *,
    rows: Tensor,
    with_entropy: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probs and entropies as `linear_logprobs` does, and in the same pass all that backward returns.

    `gradients` is called once per chunk. Backward compares what it gets with what was told. The results have the bits
    of `linear_logprobs`, and so have the gradients where the function tells the same bits that backward gets.

    Args:
        rows: int64, the positions with a label.
        with_entropy: False: no entropies are computed, and None is returned for them.
        options: of `linear_token_loss`, without `loss_grad`.

    Raises:
        RuntimeError: in backward, gradients differ from those told: they depend on other tokens. On a GPU
            the device itself stops, so that nothing waits.
    """
    told: list[Tensor] = []

    def linearised(logprobs: Tensor, entropy: Tensor | None, positions: Tensor) -> Tensor:
        values = [logprobs] if entropy is None else [logprobs, entropy]
        grads = gradients(logprobs.detach(), None if entropy is None else entropy.detach(), positions)
        told.append(torch.stack(grads))
        losses = [grad * value for grad, value in zip(grads, values, strict=True)]
        return losses[0] if len(losses) == 1 else losses[0] + losses[1]

    loss, logprobs, entropy = linear_token_loss(
        hidden, weight, labels, linearised, rows=rows, with_entropy=with_entropy, loss_grad=1.0, **options
    )
    values = [logprobs] if entropy is None else [logprobs, entropy]
    if torch.is_grad_enabled():
        all_told = torch.cat(told, 1) if told else logprobs.new_zeros(len(values), 0)
        values = list(_KnownGradients.apply(loss, rows, all_told, *values))
    return values[0], values[1] if with_entropy else None


class _KnownGradients(torch.autograd.Function):
    """Log-probs and entropies whose backward pass runs `loss`'s, after a look at the gradients that it gets.

    A rank without a label has none to look at, but its hidden states get a gradient of 0 as they do elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, rows: Tensor, told: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows, told)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    @first_derivative_only("logprobs_of_token_loss", "megarl.ops.torch_twins.linear_logprobs")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, told = ctx.saved_tensors
        returned = told.new_ones(()), None, None, *(None for _ in grads)
        if not rows.numel():
            return returned
        difference = (torch.stack([grad[rows] for grad in grads]) - told).abs().amax()
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
        return returned
