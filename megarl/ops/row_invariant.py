"""Operations whose result for a row does not depend, to the bit, on the rest of the batch. For `deterministic=true`.

A rollout server and the trainer compute a token by equal formulas, but in batches of different sizes, next to different
tokens and with different padding. Matrix products of few rows, vector tails and reductions over the length then round
differently, and log-probs differ in their last digits. These operations prevent that for float32 on CPU and one thread.
With more threads, rows and reductions would be split at places that depend on the batch. RMSNorm and rotary embedding
are not here, because torch's versions are row-invariant already.

Nor does a result depend on how tensor parallelism cuts weights. Each element of a product has the same bits beside any
other columns. A sum that may be spread over ranks has fixed summands, added in a fixed tree of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.ops.gather import gather_rows
from megarl.ops.logprob import vocab_parallel_logprobs

BLOCK_ROWS = 64  # rows of every matrix product; libraries choose code, and thereby the bits, by this number
BLOCK_COLUMNS = 64  # columns of every matrix product, likewise
MIN_ROWS = 8  # queries of an attention product; fewer take other code with other bits
LANES = 64  # elements: a multiple of every vector width
KEY_BLOCK = 64  # keys whose weights are summed at once; blocks are then added in order


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `x @ weight.T + bias` from x `[..., in]`, weight `[out, in]` and bias `[out]`. Differentiable."""
    rows, columns = x.reshape(-1, x.shape[-1]), len(weight)
    row_blocks = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK_ROWS)).split(BLOCK_ROWS)
    column_blocks = list(weight.split(BLOCK_COLUMNS))
    column_blocks[-1] = F.pad(column_blocks[-1], (0, 0, 0, -columns % BLOCK_COLUMNS))
    blocks = [torch.cat([F.linear(row_block, block) for block in column_blocks], dim=1) for row_block in row_blocks]
    out = torch.cat(blocks)[: len(rows), :columns].reshape(*x.shape[:-1], columns)
    return out if bias is None else out + bias


def linear_of_summands(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, summands: int) -> Tensor:
    """Computes `linear` as a sum of `summands` products, each over as many neighbouring inputs, in a tree of pairs.

    Ranks that cut the inputs between them hold a subtree each. `sum_in_pairs` of their results has the bits of one rank
    with all summands. `summands` is a power of two that divides the inputs.
    """
    size = x.shape[-1] // summands
    parts = zip(x.split(size, dim=-1), weight.split(size, dim=1), strict=True)
    out = sum_in_pairs([linear(part.contiguous(), cut.contiguous()) for part, cut in parts])
    return out if bias is None else out + bias


def sum_in_pairs(terms: Sequence[Tensor]) -> Tensor:
    """Adds neighbours, then neighbouring sums, and so on. The number of `terms` is a power of two."""
    while len(terms) > 1:
        terms = [first + second for first, second in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def sum_over_ranks(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Adds the ranks' `partial` in pairs. Gathers them: the order of an all-reduce is its library's."""
    return sum_in_pairs(gather_rows(partial, group).chunk(group.size()))


def route(logits: Tensor, topk: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """Chooses the `topk` experts of each token by `logits` `[tokens, experts]`.

    Returns their weights, float32, and their ids in ascending order, int64; both are `[tokens, topk]`. Weights are a
    softmax over all experts, or over the chosen ones where they are `normalized`.
    """
    ids = logits.topk(topk).indices.sort(dim=-1).values
    if normalized:
        return logits.gather(1, ids).softmax(dim=-1), ids
    return logits.softmax(dim=-1).gather(1, ids), ids


def silu(x: Tensor) -> Tensor:
    """Computes `x * sigmoid(x)` for any shape.

    Pads to whole vectors: the last elements of a tensor would otherwise take scalar code, which rounds differently.
    """
    flat = x.reshape(-1)
    return F.silu(F.pad(flat, (0, -len(flat) % LANES)))[: len(flat)].view(x.shape)


def attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Computes softmax attention, with sums over the keys in blocks of fixed length, in order. Differentiable.

    Args:
        query: `[num_seqs, heads, length, dim]`.
        key: `[num_seqs, kv_heads, key_length, dim]`, finite everywhere; heads are a multiple of kv_heads.
        value: like key.
        visible: bool `[num_seqs or 1, length, key_length]`: the keys that a query sees, at least one. All others add
            exact zeros, so padding after a sequence changes nothing.
        scale: factor of the scores.

    Returns:
        `[num_seqs, heads, length, dim]`.
    """
    num_seqs, heads, length, dim = query.shape
    kv_heads, rows = key.shape[1], heads // key.shape[1] * length
    query_padding, key_padding = -rows % MIN_ROWS, -key.shape[2] % KEY_BLOCK
    key, value = (F.pad(x, (0, 0, 0, key_padding)).reshape(num_seqs * kv_heads, -1, dim) for x in (key, value))
    queries = F.pad(query.reshape(num_seqs * kv_heads, rows, dim), (0, 0, 0, query_padding))
    hidden = F.pad(~visible, (0, key_padding), value=True)[:, None, None]
    hidden = hidden.expand(num_seqs, kv_heads, rows // length, -1, -1).reshape(num_seqs * kv_heads, rows, -1)
    scores = (queries @ key.transpose(1, 2) * scale).masked_fill(F.pad(hidden, (0, 0, 0, query_padding)), float("-inf"))
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
    """Computes log-probs of `labels` and entropy (or None) under `logits` `[tokens, >= vocab_size]`.

    Results are float32 `[tokens]`. The temperature is rounded to float32, as in SGLang.
    """
    if not isinstance(temperature, Tensor):
        temperature = torch.tensor(temperature, dtype=torch.float32)
    return vocab_parallel_logprobs(
        logits, labels, vocab_valid=vocab_size, temperature=temperature.float(), with_entropy=with_entropy
    )


def murmur_hash(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits) of each seed, position and column, as SGLang's kernel for GPUs computes it.

    Returns `[seeds, columns]`, int64.
    """
    mask = 0xFFFFFFFF
    seed = seed.view(torch.int64)
    state = torch.zeros(len(seed), 1, dtype=torch.int64)
    for word in ((seed & mask)[:, None], ((seed >> 32) & mask)[:, None], positions[:, None], columns[None]):
        mixed = word.long() * 0xCC9E2D51 & mask
        mixed = (mixed << 15 | mixed >> 17) & mask
        state = state ^ (mixed * 0x1B873593 & mask)
        state = (state << 13 | state >> 19) & mask
        state = state * 5 + 0xE6546B64 & mask
    state = state ^ 16  # bytes hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & mask
    return state ^ state >> 16
