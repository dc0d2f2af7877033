"""What a generation step on CPU does between its matrix products, one call each. No gradients.

In float32; attention takes the 16-bit floats too. Rows are the new tokens of a step, one of each sequence (decode) or
several (prefill). The key/value cache is paged as SGLang keeps it: `keys` and `values` `[num_slots, kv_heads,
head_dim]`, and `table[request, j]` the slot of token j of a request. `megarl.ops.torch_twins` has the plain-torch twins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.ops.native import _C, DTYPE_CODES, address, check_on_cpu

LANES = 16  # head_dim must be a multiple
ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def add_rms_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`residual` `[rows, width]` += `update`, in place; returns RMSNorm of it (arXiv:1910.07467), times `weight`."""
    rows, width = residual.shape
    check_on_cpu("residual", residual, (rows, width))
    check_on_cpu("weight", weight, (width,))
    if update is not None:
        check_on_cpu("update", update, (rows, width))
    out = torch.empty_like(residual)
    _C.add_norm(
        *(torch.get_num_threads(), rows, width, address(update), weight.data_ptr(), eps),
        *(residual.data_ptr(), out.data_ptr()),
    )
    return out


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
    """Norms and rotates queries and keys, and stores keys and values; returns the queries `[rows, heads, head_dim]`.

    Args:
        qkv: `[rows, (heads + 2 * kv_heads) * head_dim]`, overwritten; the queries returned are a view of it.
        keys, values: the cache; row `slots[i]` (int64 `[rows]`) receives those of row i.
        positions: int64 `[rows]`, the tokens' places in their sequences, rows of `cos_sin`.
        cos_sin: `[max_positions, head_dim]`, cosines then sines; halves of a head are rotated into each other
            (arXiv:2104.09864, in the layout of GPT-NeoX).
        q_norm, k_norm: `[head_dim]` RMSNorm weights for each head (Qwen3), with `eps`.
    """
    rows, width = qkv.shape
    _, kv_heads, dim = keys.shape
    heads = width // dim - 2 * kv_heads
    if heads < 1 or (heads + 2 * kv_heads) * dim != width or dim % LANES:
        raise ValueError(
            f"qkv has {width} columns beside a cache of {kv_heads} heads of {dim}: they must be heads of that size, "
            f"a multiple of {LANES}, with queries before the keys and values"
        )
    check_on_cpu("qkv", qkv, (rows, width))
    _check_cache(keys, values)
    check_on_cpu("slots", slots, (rows,), torch.int64)
    check_on_cpu("positions", positions, (rows,), torch.int64)
    check_on_cpu("cos_sin", cos_sin, (cos_sin.shape[0], dim))
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_on_cpu(name, norm, (dim,))
    _C.rotate_store(
        *(torch.get_num_threads(), rows, heads, kv_heads, dim, qkv.data_ptr(), address(q_norm), address(k_norm)),
        *(eps, cos_sin.data_ptr(), positions.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr()),
    )
    return qkv.view(rows, heads + 2 * kv_heads, dim)[:, :heads]


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
    """`[rows, heads, head_dim]`: each row's softmax attention over its sequence up to its own token.

    Args:
        queries: `[rows, heads, head_dim]`, rows may be apart. `heads / kv_heads` of them share a key/value head.
        keys, values, table: the cache, `table` int32 `[num_requests, max_tokens]`.
        requests, positions: int64 `[rows]`: row i sees the tokens 0..positions[i] of request requests[i].
        scale: of the scores before the softmax.
        window: how many of the last tokens are seen, the row's own included; 0: all.
    """
    rows, heads, dim = queries.shape
    dtype = queries.dtype
    if dtype not in ATTENTION_DTYPES:
        raise ValueError(f"queries have dtype {dtype}; attention takes {', '.join(map(str, ATTENTION_DTYPES))}")
    _check_cache(keys, values, dtype)
    kv_heads = keys.shape[1]
    if dim != keys.shape[2] or heads % kv_heads or dim % LANES:
        raise ValueError(
            f"queries have {heads} heads of {dim}, the cache {kv_heads} of {keys.shape[2]}: the numbers must divide, "
            f"the sizes be equal, a multiple of {LANES}"
        )
    check_on_cpu("queries", queries, (rows, heads, dim), dtype, contiguous=False)
    if rows > 1 and queries.stride()[1:] != (dim, 1):
        raise ValueError(f"queries have strides {queries.stride()}; a row's heads must be contiguous")
    check_on_cpu("table", table, (table.shape[0], table.shape[1]), torch.int32)
    check_on_cpu("requests", requests, (rows,), torch.int64)
    check_on_cpu("positions", positions, (rows,), torch.int64)
    out = torch.empty(rows, heads, dim, dtype=dtype)
    _C.paged_attention(
        *(torch.get_num_threads(), DTYPE_CODES[dtype], rows, heads, kv_heads, dim),
        *(queries.data_ptr(), queries.stride(0), keys.data_ptr(), values.data_ptr(), table.data_ptr()),
        *(table.stride(0), requests.data_ptr(), positions.data_ptr(), window, scale, out.data_ptr()),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """`[rows, width]`: silu of the first half of `gate_up` `[rows, 2 * width]`, times the second."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    check_on_cpu("gate_up", gate_up, (rows, 2 * width))
    out = torch.empty(rows, width)
    _C.silu_mul(torch.get_num_threads(), rows, width, gate_up.data_ptr(), out.data_ptr())
    return out


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row, drawn from `softmax(logits / temperature)`, and its log-prob there.

    Args:
        logits: `[rows, vocab]`, overwritten.
        temperature: `[rows]`, above 0.
        uniform: float64 `[rows]` in [0, 1): the draw.

    Returns:
        int32 and float32 `[rows]`. A row whose probabilities have no finite sum gives token 0 and NaN.
    """
    rows, vocab = logits.shape
    check_on_cpu("logits", logits, (rows, vocab))
    check_on_cpu("temperature", temperature, (rows,))
    check_on_cpu("uniform", uniform, (rows,), torch.float64)
    tokens, logprobs = torch.empty(rows, dtype=torch.int32), torch.empty(rows)
    _C.sample(
        *(torch.get_num_threads(), rows, vocab, logits.data_ptr(), temperature.data_ptr(), uniform.data_ptr()),
        *(tokens.data_ptr(), logprobs.data_ptr()),
    )
    return tokens, logprobs


def _check_cache(keys: Tensor, values: Tensor, dtype: torch.dtype = torch.float32) -> None:
    check_on_cpu("keys", keys, (keys.shape[0], keys.shape[1], keys.shape[2]), dtype)
    check_on_cpu("values", values, tuple(keys.shape), dtype)
