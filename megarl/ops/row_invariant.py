"""Operations whose result for a row has the same bits whatever else is in the batch: for `deterministic=true`, on CPU.

A rollout server and the trainer hand the same token to the same formulas, but in batches of other sizes, beside other
tokens and in sequences padded to other lengths. Matrix products of few rows, vector tails and reductions over the
length then round otherwise, and log-probs differ in their last digits. These take that away, for float32 and in one
thread: more threads cut rows and reductions at places that depend on the batch. RMSNorm and rotary embedding need
nothing: torch's own give a row the same bits everywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.ops.logprob import vocab_parallel_logprobs

BLOCK_ROWS = 64  # rows of every matrix product: libraries choose their code, and so the bits, by this number
MIN_ROWS = 8  # queries of an attention product; fewer go through other code, with other bits
LANES = 64  # elements: a multiple of what vector code of any width takes at once
KEY_BLOCK = 64  # keys whose weights are summed in one go; blocks are added up in order


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x `[..., in]`, weight `[out, in]`, bias `[out]` -> `[..., out]`. Differentiable."""
    rows = x.reshape(-1, x.shape[-1])
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK_ROWS)).split(BLOCK_ROWS)
    out = torch.cat([F.linear(block, weight) for block in blocks])[: len(rows)]
    out = out.view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, any shape. The last elements of a tensor, too few for a vector, would go through scalar code,
    whose exponential rounds otherwise."""
    flat = x.reshape(-1)
    return F.silu(F.pad(flat, (0, -len(flat) % LANES)))[: len(flat)].view(x.shape)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax attention, its sums over the keys taken in blocks of fixed length, in order. Differentiable.

    Args:
        query: `[num_seqs, heads, length, dim]`.
        key: `[num_seqs, kv_heads, key_length, dim]`, finite everywhere; heads are a multiple of kv_heads.
        value: like key.
        visible: bool `[num_seqs or 1, length, key_length]`: which keys a query sees, at least one. Keys that it does
            not see add exact zeros, so the padding behind a sequence changes nothing.
        scale: scores are multiplied by it.

    Returns:
        `[num_seqs, heads, length, dim]`.
    """
    num_seqs, heads, length, dim = query.shape
    kv_heads, rows = key.shape[1], heads // key.shape[1] * length
    missing, beyond = -rows % MIN_ROWS, -key.shape[2] % KEY_BLOCK
    key, value = (F.pad(x, (0, 0, 0, beyond)).reshape(num_seqs * kv_heads, -1, dim) for x in (key, value))
    queries = F.pad(query.reshape(num_seqs * kv_heads, rows, dim), (0, 0, 0, missing))
    hidden = F.pad(~visible, (0, beyond), value=True)[:, None, None]
    hidden = hidden.expand(num_seqs, kv_heads, rows // length, -1, -1).reshape(num_seqs * kv_heads, rows, -1)
    scores = (queries @ key.transpose(1, 2) * scale).masked_fill(F.pad(hidden, (0, 0, 0, missing)), float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    blocks = weights.unflatten(-1, (-1, KEY_BLOCK)).permute(2, 0, 1, 3).contiguous()
    sums, products = blocks.sum(-1), blocks @ value.unflatten(1, (-1, KEY_BLOCK)).transpose(0, 1).contiguous()
    total, out = sums[0], products[0]
    for i in range(1, len(blocks)):
        total, out = total + sums[i], out + products[i]
    return (out / total[..., None])[:, :rows].reshape(num_seqs, heads, length, dim)


def logprobs(
    logits: Tensor, labels: Tensor, temperature: float | Tensor, vocab_size: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """float32 `[tokens]` log-probs of `labels` and entropy (or None) under `logits` `[tokens, >= vocab_size]`.

    The temperature is rounded to float32, in which SGLang keeps it.
    """
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor(temperature, dtype=torch.float32)
    return vocab_parallel_logprobs(
        logits, labels, vocab_valid=vocab_size, temperature=temperature.float(), with_entropy=with_entropy
    )
