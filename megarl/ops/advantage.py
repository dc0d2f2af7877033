"""Advantages from rewards: group-relative advantages, generalised advantage estimation and whitening."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops.native import _C, check, check_cu_seqlens, where

GroupMode = Literal["mean_std", "mean", "leave_one_out"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
GROUP_MODES: tuple[GroupMode, ...] = ("mean_std", "mean", "leave_one_out")  # a mode's index is its code in the kernel


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mode: GroupMode = "mean_std",
    eps: float = 1e-6,
    aggregation: Aggregation = "sum_then_normalize",
) -> Tensor:
    """Computes the advantage of each sequence relative to its group, float32 `[batch]`.

    Args:
        rewards: float32 `[batch]`, or `[batch, columns]` with several rewards per sequence.
        group_ids: int64 `[batch]`; members of a group need not be adjacent.
        mode: "mean_std" is GRPO's (r - mean) / (std + eps) with the sample standard deviation. "mean" is
            Dr. GRPO's r - mean. "leave_one_out" is RLOO's r - mean of the others.
        eps: added to the standard deviation.
        aggregation: order of operations on several columns, "sum_then_normalize" or "normalize_then_sum" (GDPO).

    A group of one sequence has advantage 0, because there is nothing to compare with.
    """
    if mode not in GROUP_MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(GROUP_MODES)}")
    if aggregation not in ("sum_then_normalize", "normalize_then_sum"):
        raise ValueError(f"aggregation is {aggregation!r}; it must be sum_then_normalize or normalize_then_sum")
    if rewards.ndim not in (1, 2) or (rewards.ndim == 2 and rewards.shape[1] < 1):
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}, expected [batch] or [batch, columns]")
    columns = (rewards if rewards.ndim == 2 else rewards.unsqueeze(1)).contiguous()
    check("group_ids", group_ids, dtype=torch.int64, shape=tuple(rewards.shape[:1]), device=rewards.device)
    sorted_ids, order = torch.sort(group_ids, stable=True)
    return _group_advantage(
        columns, order, sorted_ids, GROUP_MODES.index(mode), eps, aggregation == "normalize_then_sum"
    )


def gae_packed(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns of packed sequences by GAE, float32 `[tokens]` each.

    Args:
        rewards: float32 `[tokens]`.
        values: float32 `[tokens]`.
        mask: bool `[tokens]`; False tokens (prompt, tool output) are skipped and get 0.
        cu_seqlens: int32 `[num_seqs + 1]`, rising from 0 to `tokens`.
        gamma: discount per token.
        lam: lambda, a number or float32 `[num_seqs]`.
        bootstrap: float32 `[num_seqs]`, the value after a truncated sequence; None is 0.
    """
    lambdas = lam if isinstance(lam, Tensor) else torch.full((1,), lam, dtype=torch.float32, device=rewards.device)
    return _gae(rewards, values, mask, cu_seqlens, bootstrap, gamma, lambdas)


def moments(x: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Computes count, mean and sum of squared deviations from the mean over the unmasked values: float64 `[3]`.

    With a `group`, the moments of all its ranks are merged in rank order (Chan et al. 1979).
    """
    local_moments = _moments(x, mask)
    if group is None or dist.get_world_size(group) == 1:
        return local_moments
    moments_by_rank = local_moments.new_empty(dist.get_world_size(group), 3)
    dist.all_gather(list(moments_by_rank.unbind(0)), local_moments, group=group)
    return moments_merge(moments_by_rank)


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    clip: float | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """Normalises the unmasked values of float32 `x` `[tokens]` to mean 0 and variance 1 over all ranks of `group`.

    `shift_mean=False` keeps the mean. `clip` bounds the result to `[-clip, clip]`. `eps` is added to the sample
    variance. Masked values become 0.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}, it must be positive; None is no bound")
    return _whiten(x, mask, moments(x, mask, group=group), eps, not shift_mean, math.inf if clip is None else clip)


@torch.library.custom_op("megarl::group_advantage", mutates_args=())
def _group_advantage(
    rewards: Tensor, order: Tensor, sorted_ids: Tensor, mode: int, eps: float, normalize_columns: bool
) -> Tensor:
    batch, columns = rewards.shape
    check("rewards", rewards, dtype=torch.float32, shape=(batch, columns), device=rewards.device)
    check("order", order, dtype=torch.int64, shape=(batch,), device=rewards.device)
    check("sorted_ids", sorted_ids, dtype=torch.int64, shape=(batch,), device=rewards.device)
    advantage = rewards.new_empty(batch)
    _C.group_advantage(
        *(where(rewards), batch, columns, rewards.data_ptr(), order.data_ptr(), sorted_ids.data_ptr()),
        *(mode, eps, normalize_columns, advantage.data_ptr()),
    )
    return advantage


@_group_advantage.register_fake
def _(rewards: Tensor, order: Tensor, sorted_ids: Tensor, mode: int, eps: float, normalize_columns: bool) -> Tensor:
    return rewards.new_empty(rewards.shape[0])


@torch.library.custom_op("megarl::gae", mutates_args=())
def _gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None,
    gamma: float,
    lambdas: Tensor,
) -> tuple[Tensor, Tensor]:
    shape, device, sequences = (rewards.numel(),), rewards.device, cu_seqlens.numel() - 1
    check("rewards", rewards, dtype=torch.float32, shape=shape, device=device)
    check("values", values, dtype=torch.float32, shape=shape, device=device)
    check("mask", mask, dtype=torch.bool, shape=shape, device=device)
    check_cu_seqlens(cu_seqlens, shape[0], device)
    if bootstrap is not None:
        check("bootstrap", bootstrap, dtype=torch.float32, shape=(sequences,), device=device)
    lambda_shape = (1,) if lambdas.shape == (1,) else (sequences,)
    check("lam", lambdas, dtype=torch.float32, shape=lambda_shape, device=device)
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    _C.gae(
        *(where(rewards), sequences, rewards.data_ptr(), values.data_ptr(), mask.data_ptr(), cu_seqlens.data_ptr()),
        *(bootstrap.data_ptr() if bootstrap is not None else 0, gamma, lambdas.data_ptr(), int(lambdas.numel() > 1)),
        *(advantages.data_ptr(), returns.data_ptr()),
    )
    return advantages, returns


@_gae.register_fake
def _(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    bootstrap: Tensor | None,
    gamma: float,
    lambdas: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(rewards)


@torch.library.custom_op("megarl::moments", mutates_args=())
def _moments(x: Tensor, mask: Tensor) -> Tensor:
    tokens = x.numel()
    check("x", x, dtype=torch.float32, shape=(tokens,), device=x.device)
    check("mask", mask, dtype=torch.bool, shape=(tokens,), device=x.device)
    chunks = -(-tokens // _C.moment_chunk)
    partials = torch.empty(chunks, 3, dtype=torch.float64, device=x.device)
    result = torch.empty(3, dtype=torch.float64, device=x.device)
    _C.moments(where(x), tokens, x.data_ptr(), mask.data_ptr(), partials.data_ptr(), result.data_ptr())
    return result


@_moments.register_fake
def _(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(3, dtype=torch.float64)


@torch.library.custom_op("megarl::moments_merge", mutates_args=())
def moments_merge(parts: Tensor) -> Tensor:
    """Merges the moments of disjoint sets in order: float64 `[parts, 3]` to `[3]`."""
    check("parts", parts, dtype=torch.float64, shape=(parts.shape[0], 3), device=parts.device)
    result = parts.new_empty(3)
    _C.merge_moments(where(parts), parts.shape[0], parts.data_ptr(), result.data_ptr())
    return result


@moments_merge.register_fake
def _(parts: Tensor) -> Tensor:
    return parts.new_empty(3)


@torch.library.custom_op("megarl::whiten", mutates_args=())
def _whiten(x: Tensor, mask: Tensor, moments: Tensor, eps: float, keep_mean: bool, clip: float) -> Tensor:
    tokens = x.numel()
    check("x", x, dtype=torch.float32, shape=(tokens,), device=x.device)
    check("mask", mask, dtype=torch.bool, shape=(tokens,), device=x.device)
    check("moments", moments, dtype=torch.float64, shape=(3,), device=x.device)
    out = torch.empty_like(x)
    _C.whiten(where(x), tokens, x.data_ptr(), mask.data_ptr(), moments.data_ptr(), eps, keep_mean, clip, out.data_ptr())
    return out


@_whiten.register_fake
def _(x: Tensor, mask: Tensor, moments: Tensor, eps: float, keep_mean: bool, clip: float) -> Tensor:
    return torch.empty_like(x)
