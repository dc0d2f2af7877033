"""Operations between the matrix products of a generation step on CPU, in one call each. No gradients.

They take float32; attention also takes the 16-bit floats. Rows are the new tokens of a step: one per sequence (decode)
or several (prefill). The KV cache is paged like SGLang's: `keys` and `values` `[num_slots, kv_heads, head_dim]`, and
`table[request, j]` is the slot of token j of a request. `megarl.cpu.torch_twins` has the plain-torch twins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.ops.native import _C, DTYPE_CODES, address, check_on_cpu

LANES = 16  # head_dim must be a multiple of it
ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def add_rms_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Adds `update` to `residual` `[rows, width]` in place and returns RMSNorm of the sum (arXiv:1910.07467)."""
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
    """Normalises and rotates queries and keys, and stores keys and values in the cache.

    Args:
        qkv: `[rows, (heads + 2 * kv_heads) * head_dim]`, overwritten.
        keys, values: the cache; the key and value of row i go to slot `slots[i]` (int64 `[rows]`).
        positions: int64 `[rows]`, each token's position in its sequence, an index into `cos_sin`.
        cos_sin: `[max_positions, head_dim]`, cosines then sines. Rotary embedding in GPT-NeoX layout: the halves of a
            head are rotated (arXiv:2104.09864).
        q_norm, k_norm: `[head_dim]` RMSNorm weights of the heads (Qwen3), with `eps`.

    Returns:
        The queries `[rows, heads, head_dim]`, a view of `qkv`.

    Raises:
        IndexError: a slot is not in the cache, or a position not in `cos_sin`.
    """
    rows, width = qkv.shape
    _, kv_heads, dim = keys.shape
    heads = width // dim - 2 * kv_heads
    if heads < 1 or (heads + 2 * kv_heads) * dim != width or dim % LANES:
        raise ValueError(
            f"qkv has {width} columns, the cache {kv_heads} heads of {dim}: the columns must be heads of that size, "
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
        *(eps, cos_sin.data_ptr(), positions.data_ptr(), slots.data_ptr(), cos_sin.shape[0], keys.shape[0]),
        *(keys.data_ptr(), values.data_ptr()),
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
    """Computes each row's causal softmax attention over the paged KV cache, `[rows, heads, head_dim]`.

    Args:
        queries: `[rows, heads, head_dim]`; the row stride may be larger. `heads / kv_heads` heads share a KV head.
        keys, values, table: the cache; `table` is int32 `[num_requests, max_tokens]`.
        requests, positions: int64 `[rows]`; row i attends to tokens 0..positions[i] of request requests[i].
        scale: factor of the scores before the softmax.
        window: attends only to this many last tokens, including the row's own; 0 is all.

    Raises:
        IndexError: a request, a position or a slot in the table is outside of the table or the cache.
    """
    rows, heads, dim = queries.shape
    dtype = queries.dtype
    if dtype not in ATTENTION_DTYPES:
        raise ValueError(f"queries have dtype {dtype}; attention takes {', '.join(map(str, ATTENTION_DTYPES))}")
    _check_cache(keys, values, dtype)
    kv_heads = keys.shape[1]
    if dim != keys.shape[2] or heads % kv_heads or dim % LANES:
        raise ValueError(
            f"queries have {heads} heads of {dim}, the cache {kv_heads} of {keys.shape[2]}: heads must be a multiple "
            f"of the cache's heads, with the same size, a multiple of {LANES}"
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
        *(*table.shape, keys.shape[0], requests.data_ptr(), positions.data_ptr(), window, scale, out.data_ptr()),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Computes silu of the first half of `gate_up` `[rows, 2 * width]` times the second half, `[rows, width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    check_on_cpu("gate_up", gate_up, (rows, 2 * width))
    out = torch.empty(rows, width)
    _C.silu_mul(torch.get_num_threads(), rows, width, gate_up.data_ptr(), out.data_ptr())
    return out


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples a token per row from `softmax(logits / temperature)`, and computes its log-prob.

    Args:
        logits: `[rows, vocab]`, overwritten.
        temperature: `[rows]`, above 0.
        uniform: float64 `[rows]` in [0, 1), the random numbers.

    Returns:
        Tokens int32 `[rows]` and log-probs float32 `[rows]`. A row without a finite sum of probabilities gives token 0
        and NaN.
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
