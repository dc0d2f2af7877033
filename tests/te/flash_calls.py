"""Attention over shared prompts on tensors without data: torch's operators take the calls, and give these shapes.

Run alone by the Python of a GPU environment, which has no pytest, or imported by a test. Covers the signatures and
the dtypes, shapes and devices that torch declares for them. Not covered: values, and the kernels' own checks.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megarl.actor.batch.shared_prefix import share_in_segments
from megarl.actor.model.attention import prefix as prefix_attention
from megarl.actor.model.attention.prefix import Bounds
from megarl.types import PackedBatch, cu_seqlens_of


def conversations() -> PackedBatch:
    """Two groups: completions of one prompt, and conversations that part at two places."""
    first = [[7] * 20 + [i] * 5 for i in range(3)]
    turns = list(range(300))
    second = [[*turns, 1], turns[:260] + [2] * 9, turns[:130] + [3] * 4, [400] * 6]
    ids = [torch.tensor(row) for row in first + second]
    return PackedBatch(
        cu_seqlens_of(torch.tensor([len(row) for row in ids])),
        {"input_ids": torch.cat(ids)},
        {"group_ids": torch.tensor([0] * 3 + [1] * 4)},
    )


def moved(bounds: Bounds, device: str) -> Bounds:
    queries, keys = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (bounds.queries, bounds.keys))
    return dataclasses.replace(bounds, queries=queries, keys=keys)


def run(device: str, dim: int) -> None:
    """Forward and backward on a device of tensors without data."""
    batch = conversations()
    shared = share_in_segments(batch)
    tokens = len(shared.source)
    plan: Any = prefix_attention.pack_segments(batch.cu_seqlens, torch.device("meta"), shared=shared)
    with FakeTensorMode():
        packed = dataclasses.replace(
            plan,
            own=moved(plan.own, device),
            earlier=moved(plan.earlier, device),
            ancestors=torch.empty(plan.ancestors.shape, dtype=torch.long, device=device),
        )
        query, key, value = (
            torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=device) for heads in (8, 2, 2)
        )
        saved: list[Any] = []
        context = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
        attention = prefix_attention._SegmentAttention
        out = attention.forward(context, query, key, value, packed, dim**-0.5)
        assert (out.shape, out.dtype, out.device) == (query.shape, query.dtype, query.device)
        lse = saved[4]
        assert (lse.shape, lse.dtype, lse.device) == ((8, tokens), torch.float32, query.device)
        context.saved_tensors = saved
        with torch.no_grad():
            grads = attention.backward(context, torch.empty_like(out))
        for grad, tensor in zip(grads[:3], (query, key, value), strict=True):
            assert (grad.shape, grad.dtype, grad.device) == (tensor.shape, tensor.dtype, tensor.device)


if __name__ == "__main__":
    run("cuda", 128)
