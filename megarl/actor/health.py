"""Detects steps to skip: a loss or gradient that is not finite on any rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from megarl.parallel import platform


class NonFiniteError(FloatingPointError):
    """Raised when more than `actor.max_skipped_steps` steps in a row had a loss or gradient that is not finite."""


def gradients_are_finite(ddps: list[Any]) -> bool:
    """True if every element of this rank's gradient buffers is finite.

    The gradient norm alone is not enough: it skips parameters that another tp rank or pipeline stage counts.
    """
    buffers = [buffer for ddp in ddps for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in buffers]
    return not norms or all(math.isfinite(norm) for norm in torch.stack(norms).tolist())  # one wait for the device


def on_all_ranks(finite: bool) -> bool:
    """True if `finite` holds on every rank. A collective, so that either all ranks skip a step or none does."""
    if dist.get_world_size() == 1:
        return finite
    flag = torch.tensor([finite], dtype=torch.int32).to(platform.device(), non_blocking=True)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


class SkippedSteps:
    """Counts consecutive skipped steps, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def record(self, skipped: bool, loss: float, grad_norm: float) -> None:
        """Counts one step.

        Raises:
            NonFiniteError: more than `limit` steps in a row were skipped.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row > self.limit:
            steps = f"{self.in_a_row} step{'s' * (self.in_a_row > 1)} in a row"
            raise NonFiniteError(
                f"{steps} had a loss or gradient that is not finite (last: loss {loss}, gradient norm {grad_norm}), "
                f"actor.max_skipped_steps={self.limit} allows {self.limit}; parameters are unchanged: lower "
                "actor.optimizer.lr, or resume from an earlier checkpoint"
            )
