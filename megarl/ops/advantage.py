"""Advantages from rewards: group-relative normalisation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.ops import kernels

GroupMode = Literal["mean_std", "mean", "leave_one_out"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
GROUP_MODES: tuple[GroupMode, ...] = ("mean_std", "mean", "leave_one_out")  # positions are the kernel's codes


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mode: GroupMode = "mean_std",
    eps: float = 1e-6,
    aggregation: Aggregation = "sum_then_normalize",
) -> Tensor:
    """Advantage of each sequence relative to its group, float32 `[batch]`.

    Args:
        rewards: float32 `[batch]`, or `[batch, columns]` where there are several rewards.
        group_ids: int64 `[batch]`; members of a group need not be adjacent.
        mode: "mean_std" is GRPO's (r - mean) / (std + eps) with the sample standard deviation, "mean" is
            Dr. GRPO's r - mean, "leave_one_out" is RLOO's r - mean of the others.
        eps: added to the standard deviation.
        aggregation: of several columns: "sum_then_normalize", or "normalize_then_sum" (GDPO).

    A group of one has advantage 0: it has nothing to compare with.
    """
    if mode not in GROUP_MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(GROUP_MODES)}")
    if aggregation not in ("sum_then_normalize", "normalize_then_sum"):
        raise ValueError(f"aggregation is {aggregation!r}; it must be sum_then_normalize or normalize_then_sum")
    if rewards.ndim not in (1, 2):
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}, expected [batch] or [batch, columns]")
    kernels.check("group_ids", group_ids, dtype=torch.int64, shape=rewards.shape[:1], device=rewards.device)
    columns = (rewards if rewards.ndim == 2 else rewards.unsqueeze(1)).contiguous()
    sorted_ids, order = torch.sort(group_ids, stable=True)
    return kernels.group_advantage(
        columns, order, sorted_ids, GROUP_MODES.index(mode), eps, aggregation == "normalize_then_sum"
    )
