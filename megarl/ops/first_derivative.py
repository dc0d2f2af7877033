"""Refusal of second derivatives, for operations whose gradient comes from a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivative_only(operation: str, remedy: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the `backward` of an autograd function: it refuses to run under `create_graph=True`.

    Autograd sees no kernel, so a second derivative would lack what the gradient owes to the operation's inputs.
    `torch.autograd.function.once_differentiable` refuses later and less: it notices neither a constant upstream
    gradient nor a second term that reaches the same inputs by another way.

    Args:
        operation: name in the error.
        remedy: what to use instead.

    Raises:
        RuntimeError: at the first backward pass that is to be differentiated again.
    """

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            # Autograd runs a backward pass with gradients enabled only to differentiate it again.
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{operation} has no second derivative, but create_graph=True asks for it; leave that out, or use "
                    f"{remedy}"
                )
            return backward(ctx, *grads)

        return checked

    return decorated
