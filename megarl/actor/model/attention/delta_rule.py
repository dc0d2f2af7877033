"""Gated delta rule and causal convolution over packed sequences, in plain torch.

The rule (Yang et al. 2024, arXiv:2412.06464) keeps a matrix S of keys by values for each head. Queries read it:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T        o_t = S_t^T q_t

Sequences are computed in chunks. Inside a chunk the updates form a triangular system, solved at once for all chunks of
all sequences. Only the states between chunks are computed one after another, for all sequences together. A sequence
begins with a state of zeros, and its convolution sees zeros before its first token: sequences never see each other.

Stands in for flash-linear-attention (`fla`) where that cannot run. Both take the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.actor.batch.context_parallel import Cut, LocalTokens
from megarl.device_copies import OnHost

WHOLE = Cut()
CHUNK = 64  # tokens; flash-linear-attention and transformers take as many
NORM_EPS = 1e-6  # added to the squared length of queries and keys


@dataclass(frozen=True)
class Recurrence:
    """Plan of a packed microbatch for layers that read tokens in order.

    Under context parallelism these layers have all tokens of some heads. Under shared prompts a prompt's tokens are
    repeated for each of its sequences. `gather` and `select` lead into that order and back.
    """

    cu_seqlens: Tensor  # int32 [num_seqs + 1]: bounds of the sequences in order
    positions: Tensor  # int64 [tokens]: position of each token in its sequence
    chunk: int  # tokens of a chunk
    counts: tuple[int, ...]  # by place of a chunk in its sequence: number of sequences that have it, descending
    slots: Tensor  # int64 [chunks * chunk]: token of each slot, by place, then by sequence; padding repeats the last
    real: Tensor  # bool [chunks * chunk]: False for padding
    restore: Tensor  # int64 [tokens]: slot of each token
    host_cu_seqlens: OnHost  # int64 [num_seqs + 1]: the bounds
    gather: Tensor | None = None  # int64 [tokens]: row of each token in the layer's input; None: it is in order
    select: Tensor | None = None  # int64 [rows]: token that gives each row of the layer's output


def plan_recurrence(
    cu_seqlens: Tensor, device: torch.device, cut: Cut = WHOLE, shared: LocalTokens | None = None
) -> Recurrence:
    """Plans a packed microbatch; see `pack_in_blocks` for the arguments."""
    lengths = cu_seqlens.diff().long()
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    positions = torch.arange(int(cu_seqlens[-1])) - cu_seqlens.long()[sequences]
    gather = select = None
    if cut.cp_size > 1:
        gather = cut.rows(cu_seqlens, sequences, positions)
        select = torch.empty_like(gather)
        select[gather] = torch.arange(len(gather))
    elif shared is not None:
        gather, select = shared.rows, shared.source
    chunk = min(CHUNK, 1 << max(0, int(lengths.max()) - 1).bit_length())
    order = lengths.argsort(descending=True, stable=True)
    chunks = -(-lengths[order] // chunk)
    counts = [int((chunks > place).sum()) for place in range(int(chunks[0]))]
    places = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    members = torch.cat([order[:count] for count in counts])
    inside = places[:, None] * chunk + torch.arange(chunk)
    real = inside < lengths[members, None]
    slots = cu_seqlens.long()[members, None] + torch.minimum(inside, lengths[members, None] - 1)
    restore = torch.empty_like(positions)
    restore[slots[real]] = real.flatten().nonzero().squeeze(1)
    parts = (positions, chunk, tuple(counts), slots.flatten(), real.flatten(), restore)
    return Recurrence(cu_seqlens, *parts, OnHost(cu_seqlens.long()), gather, select)


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Computes silu of a causal convolution by channel, of x `[tokens, channels]` with weight `[channels, width]`.

    Sums in float32.
    """
    rows, taps = x.float(), weight.float()
    result = rows * taps[:, -1]
    for back in range(1, weight.shape[1]):
        earlier = F.pad(rows, (0, 0, back, 0))[: len(rows)]  # also where the pack has fewer than `back` tokens
        inside = (positions >= back)[:, None]
        result = result + torch.where(inside, earlier, 0) * taps[:, -1 - back]
    return F.silu(result).to(x.dtype)


def unit_length(x: Tensor) -> Tensor:
    """Scales vectors to length 1, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, plan: Recurrence) -> Tensor:
    """Computes the rule's outputs `[tokens, heads, value dim]` in float32, returned in the dtype of `value`.

    Args:
        query: `[tokens, heads, key dim]`, of length 1. Scaled here by key dim ** -0.5.
        key: `[tokens, heads, key dim]`, of length 1.
        value: `[tokens, heads, value dim]`.
        g: log of the decay, at most 0, `[tokens, heads]`.
        beta: strength of a token's update, 0 to 1, `[tokens, heads]`.
        plan: order of the tokens.
    """
    real = plan.real[:, None]
    q, k, v = (_in_chunks(x, plan) for x in (query * query.shape[-1] ** -0.5, key, value))
    decay = _in_chunks(g, plan, real).cumsum(-1)  # log of the decay since the chunk's beginning
    strength = _in_chunks(beta, plan, real)[..., None]
    future = torch.ones(plan.chunk, plan.chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, float("-inf")).exp()
    weighted = k * strength
    # Row i of the system: update i subtracts the value that the chunk's earlier updates already give for its key.
    system = (weighted @ k.mT) * between
    right = torch.cat((v * strength, weighted * decay.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    updates, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    inside = (q @ k.mT) * between
    q = q * decay.exp()[..., None]
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    passing = decay[..., -1, None, None].exp()

    state = v.new_zeros(plan.counts[0], v.shape[1], k.shape[-1], v.shape[-1])
    outputs = []
    for count, parts in zip(
        plan.counts,
        zip(*(x.split(plan.counts) for x in (updates, reads, inside, q, k, passing)), strict=True),
        strict=True,
    ):
        update, read, scores, q_i, k_i, passing_i = parts
        state = state[:count]
        update = update - read @ state
        outputs.append(q_i @ state + scores @ update)
        state = state * passing_i + k_i.mT @ update
    flat = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, plan.restore).to(value.dtype)


def _in_chunks(x: Tensor, plan: Recurrence, real: Tensor | None = None) -> Tensor:
    """Gathers `[chunks, heads, chunk, ...]` of `x [tokens, heads, ...]` in float32, with zeros where not `real`."""
    slots = x.float().index_select(0, plan.slots)
    if real is not None:
        slots = torch.where(real, slots, 0)
    return slots.unflatten(0, (-1, plan.chunk)).transpose(1, 2)
