"""Plain-torch twins of the CPU kernels, with the same names and results, for reading and tests. Autograd applies."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.cpu.attention import Sequences


def add_rms_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `megarl.cpu.decode.add_rms_norm`; without `update` also `megarl.cpu.layer_ops.rms_norm`."""
    if update is not None:
        residual += update
    return residual * (residual.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `megarl.cpu.decode.rotate_and_store`. Does not change `qkv`."""
    _, kv_heads, dim = keys.shape
    q, k, v = qkv.view(len(qkv), -1, dim).tensor_split([-2 * kv_heads, -kv_heads], dim=1)

    def rotated(heads: Tensor, norm: Tensor | None) -> Tensor:
        return rotate(heads if norm is None else add_rms_norm(heads, None, norm, eps), cos_sin[positions])

    keys[slots], values[slots] = rotated(k, k_norm), v
    return rotated(q, q_norm)


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    requests: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """See `megarl.cpu.decode.paged_attention`."""
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for row, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
        slots = table[request, max(0, position + 1 - window) if window else 0 : position + 1].long()
        k, v = (cache[slots].float().transpose(0, 1) for cache in (keys, values))
        q = queries[row].float().view(len(k), -1, queries.shape[2])
        weights = (q @ k.transpose(1, 2) * scale).softmax(-1)
        out[row] = (weights @ v).flatten(0, 1)
    return out


def packed_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> Tensor:
    """See `megarl.cpu.attention.packed_attention`."""
    out = torch.zeros_like(query)
    bounds = sequences.cu_seqlens.tolist()
    for begin, end, skipped in zip(bounds, bounds[1:], sequences.skipped.tolist(), strict=False):
        rows = sequences.rows[begin:end]
        q = query[rows[skipped:]].transpose(0, 1)
        k, v = (x[rows].transpose(0, 1).repeat_interleave(len(q) // x.shape[1], 0) for x in (key, value))
        masked = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)[skipped:]
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(masked, float("-inf")).softmax(-1)
        out = out.index_put((rows[skipped:],), (weights @ v).transpose(0, 1))
    return out


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """See `megarl.cpu.layer_ops.rotate`."""
    (low, high), (cos, sin) = x.chunk(2, -1), cos_sin[:, None].chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `megarl.cpu.decode.silu_mul` and `megarl.cpu.layer_ops.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """See `megarl.cpu.decode.sample`. Computes in float64 and does not change `logits`."""
    logprobs = (logits.double() / temperature[:, None]).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    tokens = (cumulative > uniform[:, None] * cumulative[:, -1:]).int().argmax(-1)
    return tokens.int(), logprobs.gather(1, tokens[:, None])[:, 0].float()
