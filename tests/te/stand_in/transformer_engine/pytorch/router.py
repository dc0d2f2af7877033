"""Fused routing: one kernel in forward and one in backward, as the real one computes them (fused_router, 2.12.0).

The kernel's order of comparisons is kept, and so is what it does with NaN: see `largest`. Fused losses that balance
experts are names alone, which Megatron imports; megarl trains without such a loss.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from transformer_engine.kernels import kernel
from transformer_engine.signatures import taken

LANES = 32  # threads of a warp, which routes one token
EPSILON = 1e-20


def _absent(*_: Any, **__: Any) -> None:
    raise NotImplementedError("the stand-in of Transformer Engine has no fused losses of routing")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = _absent


def largest(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` largest scores of each row, int64 `[rows, count]`.

    Each lane of a warp looks at every 32nd score, then lanes compare in pairs. A place taken before counts as -inf. NaN
    is larger than nothing, so a row of NaN gives its first place again and again.
    """
    rows, width = scores.shape
    places = torch.arange(width).expand(rows, -1)
    taken_before = torch.zeros_like(scores, dtype=torch.bool)
    lanes, found = torch.arange(LANES), []
    for _ in range(count):
        left = scores.double().masked_fill(taken_before, -torch.inf)
        value = left.new_full((rows, LANES), -torch.inf)
        place = torch.zeros(rows, LANES, dtype=torch.int64)
        for start in range(0, width, LANES):
            part = left[:, start : start + LANES]
            held, held_place = value[:, : part.shape[1]], place[:, : part.shape[1]]
            wins = part > held if start else torch.ones_like(part, dtype=torch.bool)
            held_place[wins] = places[:, start : start + LANES][wins]
            held[wins] = part[wins]
        for step in (16, 8, 4, 2, 1):
            other, other_place = value[:, lanes ^ step], place[:, lanes ^ step]
            wins = other > value
            value, place = torch.where(wins, other, value), torch.where(wins, other_place, place)
        found.append(place[:, 0])
        taken_before = taken_before.scatter(1, place[:, :1], True)
    return torch.stack(found, dim=1)


def _in_groups(scores: Tensor, a: SimpleNamespace) -> Tensor:
    """Places by scores within the best groups alone: a group's score is the sum of its largest ones."""
    rows, width = scores.shape
    size = width // a.num_groups
    parts = scores.reshape(rows * a.num_groups, size)
    best = parts.gather(1, largest(parts, a.topk // a.group_topk)).sum(1).view(rows, a.num_groups)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, largest(best, a.group_topk), True)
    return largest(scores.masked_fill(~kept.repeat_interleave(size, dim=1), -torch.inf), a.topk)


class _Routing(torch.autograd.Function):
    """Probabilities and map of the chosen experts, `[tokens, experts]`, by the kernel's formulas."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, a: SimpleNamespace) -> tuple[Tensor, Tensor]:
        with kernel("fused_topk"):
            softmax_first = a.use_pre_softmax and a.score_function == "softmax"
            kept = logits.softmax(-1) if softmax_first else logits  # for backward
            if a.score_function == "sigmoid":
                kept = logits.sigmoid()
            scores = kept if a.expert_bias is None else kept + a.expert_bias
            chosen = _in_groups(scores, a) if a.group_topk else largest(scores, a.topk)
            weights = scores.gather(1, chosen)
            if a.expert_bias is not None:
                weights = (weights.double() - a.expert_bias[chosen].double()).float()
            if a.score_function == "softmax" and not softmax_first:
                weights = weights.softmax(-1)
                kept = torch.full_like(logits, -torch.inf).scatter(1, chosen, weights)
            if a.score_function == "sigmoid" and a.topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
            probs = torch.zeros_like(logits).scatter(1, chosen, a.scaling_factor * weights)
            routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        ctx.a, ctx.softmax_first = a, softmax_first
        ctx.mark_non_differentiable(routing_map)
        ctx.save_for_backward(routing_map, kept)
        return probs, routing_map

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (routing_map, kept), a = ctx.saved_tensors, ctx.a
        with kernel("fused_topk_backward"):
            grad = (grad * a.scaling_factor).masked_fill(~routing_map, 0.0)
            chosen = kept.masked_fill(~routing_map, 0.0)
            if a.score_function == "softmax":
                y = kept if ctx.softmax_first else chosen
                return y * (grad - (grad * y).sum(-1, keepdim=True)), None
            if a.topk > 1:
                total = chosen.sum(-1, keepdim=True) + EPSILON
                grad = grad / total - (grad * chosen).sum(-1, keepdim=True) / total**2
                grad = grad.masked_fill(~routing_map, 0.0)
            return grad * kept * (1 - kept), None


def fused_topk_with_score_function(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    names = "logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias"
    a = taken("router.fused_topk_with_score_function", names, args, kwargs)
    assert a.logits.dtype != torch.float64, "Current TE does not support float64 router type"
    assert a.logits.dtype == torch.float32, "the kernel would compute scores in the dtype of the logits"
    assert min(a.logits.shape) > 0, "num_tokens and num_experts must be greater than 0"
    assert a.score_function in ("softmax", "sigmoid"), "score_function must be softmax or sigmoid for router fusion"
    assert a.expert_bias is None or a.score_function == "sigmoid", "expert_bias is for sigmoid"
    a.scaling_factor = 1.0 if a.scaling_factor is None else a.scaling_factor
    logits, a.logits = a.logits, None
    probs, routing_map = _Routing.apply(logits, a)
    return probs, routing_map
