"""Attention and rotary positions over packed sequences, in plain torch.

Megatron's local `DotProductAttention` refuses packed sequences, and its rotary code splits them one by one. Here the
sequences of a microbatch are gathered into a few padded blocks of similar length, each block is one call of
`scaled_dot_product_attention`, and the rotary angles are looked up once per token. Nothing attends across a border.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.actor.batch.context_parallel import Cut, LocalTokens, gather_keys_values

WHOLE = Cut()
MOST_MASKED = 2048  # keys: a mask of more would take memory that matters
CAUSAL_ROWS = 32  # queries that torch's causal attention takes at once on the CPU, with all keys that one of them sees


@dataclass(frozen=True)
class Block:
    """Queries of sequences of similar length, padded to the longest, and the keys before and at them.

    `queries` int64 `[num_seqs * length]` is the local token of each padded slot (padding repeats the sequence's last
    one), `valid` int64 are the slots that hold real tokens. `keys` int64 `[num_seqs * key_length]` are rows among the
    tokens of all cp ranks. `mask` bool `[num_seqs, 1, length, key_length]` is set where a query sees a key; None: both
    are the same tokens, and the mask is causal.
    """

    num_seqs: int
    length: int
    queries: Tensor
    valid: Tensor
    key_length: int
    keys: Tensor
    mask: Tensor | None


@dataclass
class PackedBlocks(PackedSeqParams):
    """A packed microbatch in padded blocks of similar lengths, for `PackedAttention`.

    Megatron's `cu_seqlens_*` stay None, so that its rotary code takes one angle per token.
    """

    positions: Tensor | None = None  # int64 [local tokens]: place of each token in its sequence
    blocks: list[Block] = field(default_factory=list)
    restore: Tensor | None = None  # int64 [local tokens]: from the blocks' order back to token order


@dataclass
class PackedBounds(PackedSeqParams):
    """A packed microbatch by its sequence bounds, for Transformer Engine's attention."""

    positions: Tensor | None = None  # int64 [longest sequence]: rows of the table of rotary angles


def pack_in_blocks(
    cu_seqlens: Tensor, device: torch.device, cut: Cut = WHOLE, shared: LocalTokens | None = None
) -> PackedBlocks:
    """Plans attention for sequences laid end to end; `cu_seqlens` is int32 `[num_seqs + 1]`, on the host, padded as
    `cut` needs it. With `shared` (and no cut) the model is given the tokens `shared.source` of them only.

    A block holds chunks of lengths in (2^(k-1), 2^k], so that less than half of it is padding. Queries of a beginning
    that another sequence computes are left out where that is less work (`_left_out`).
    """
    starts, sizes = cu_seqlens.long()[:-1] // cut.cp_size, cut.chunk_lengths(cu_seqlens)
    total = int(cu_seqlens[-1]) // cut.cp_size
    given, place, skipped = torch.ones(total, dtype=torch.bool), torch.arange(total), torch.zeros_like(sizes)
    if shared is not None:
        given, place = torch.zeros_like(given).index_fill_(0, shared.source, True), shared.rows
        skipped = _left_out(sizes, given) if device.type == "cpu" else skipped
    taken = sizes - skipped
    classes = _size_class(sizes) * 64 + _size_class(taken)
    positions = torch.empty(int(given.sum()), dtype=torch.long)
    blocks, order = [], []
    for half, chunk in enumerate(cut.my_chunks()):
        for value in classes[taken > 0].unique().tolist():
            members = ((classes == value) & (taken > 0)).nonzero().squeeze(1)
            size, count, length = sizes[members, None], taken[members, None], int(taken[members].max())
            slots = skipped[members, None] + torch.minimum(torch.arange(length), count - 1)
            queries = starts[members, None] + half * size + slots
            valid = ((torch.arange(length) < count) & given[queries]).flatten().nonzero().squeeze(1)
            queries = place[queries]
            at = chunk * size + slots
            order.append(queries.flatten()[valid])
            positions[order[-1]] = at.flatten()[valid]
            keys, key_length, mask = queries, length, None
            if cut.cp_size > 1 or bool((count < size).any()):
                key_length = (chunk + 1) * int(size.max())
                key_slots = torch.minimum(torch.arange(key_length), (chunk + 1) * size - 1)
                keys = cut.rows(cu_seqlens, members[:, None].expand_as(key_slots), key_slots)
                keys = keys if shared is None else place[keys]
                mask = (torch.arange(key_length) <= at[..., None])[:, None].to(device)
            where = (t.flatten().to(device) for t in (queries, valid, keys))
            blocks.append(Block(len(members), length, next(where), next(where), key_length, next(where), mask))
    order_all = torch.cat(order) if order else torch.empty(0, dtype=torch.long)
    restore = torch.empty_like(order_all)
    restore[order_all] = torch.arange(len(order_all))
    return PackedBlocks(qkv_format="thd", positions=positions.to(device), blocks=blocks, restore=restore.to(device))


def _size_class(sizes: Tensor) -> Tensor:
    """int64: k for sizes in (2^(k-1), 2^k], 0 up to 1."""
    return sizes.clamp(min=1).double().log2().ceil().long()


def _left_out(sizes: Tensor, given: Tensor) -> Tensor:
    """int64 `[num_seqs]`: how many queries at the beginning of each sequence are left out: those that the model is not
    `given`, where masked attention of the others to all keys has fewer scores than causal attention of all."""
    ends = sizes.cumsum(0)
    counted = torch.nn.functional.pad(given.long().cumsum(0), (1, 0))
    rest = counted[ends] - counted[ends - sizes]
    return torch.where((2 * rest < sizes + CAUSAL_ROWS) & (sizes <= MOST_MASKED), sizes - rest, 0)


def pack_with_bounds(
    cu_seqlens: Tensor, device: torch.device, cut: Cut = WHOLE, shared: LocalTokens | None = None
) -> PackedBounds:
    """The same for Transformer Engine's attention, which cuts padded sequences in zigzag order itself: bounds for the
    kernels, and one table of angles, from which Megatron's rotary code takes each rank's part."""
    bounds, longest = cu_seqlens.to(device), int(cu_seqlens.diff().max())
    return PackedBounds(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=torch.arange(longest, device=device),
    )


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences: Megatron's `core_attention` for the local layer spec.

    Under context parallelism every rank gathers the keys and values of all.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.cp = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedBlocks,
        **_: Any,
    ) -> Tensor:
        """query `[tokens, heads, dim]`, key and value `[tokens, kv_heads, dim]` -> `[tokens, heads * dim]`."""
        if self.cp is not None:
            key, value = gather_keys_values(key, value, self.cp)
        outputs = []
        for block in packed_seq_params.blocks:
            q = _padded(query, block.queries, block.num_seqs)
            k, v = (_padded(x, block.keys, block.num_seqs) for x in (key, value))
            out = self.attend(q, k, v, block.mask)
            flat = out.transpose(1, 2).reshape(block.num_seqs * block.length, -1)
            outputs.append(flat.index_select(0, block.valid))
        assert packed_seq_params.restore is not None
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, packed_seq_params.restore)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`[num_seqs, heads, length, dim]` of one block; `mask` as the block's."""
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )


def _padded(values: Tensor, rows: Tensor, num_seqs: int) -> Tensor:
    """`[num_seqs, heads, length, dim]` of the rows of `[tokens, heads, dim]`."""
    return values.index_select(0, rows).view(num_seqs, -1, *values.shape[1:]).transpose(1, 2)


class PackedRotary(torch.nn.Module):
    """Rotary angles per token, in place of Megatron's `RotaryEmbedding`.

    `inv_freq` `[dim / 2]` comes from transformers' own table of rotary variants, so that scaled variants (llama3,
    linear) agree with the checkpoint's definition.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def get_rotary_seq_len(self, *args: Any) -> Tensor:
        """Megatron asks for a length here and hands it to `forward`; the packed positions take its place."""
        positions = args[4].positions
        assert positions is not None
        return positions

    def forward(self, positions: Tensor, packed_seq: bool = True, cp_group: Any = None) -> Tensor:
        """Angles `[tokens, 1, dim]` for positions `[tokens]`."""
        angles = positions.to(self.inv_freq.device)[:, None].float() * self.inv_freq
        return torch.cat((angles, angles), dim=-1)[:, None, :]
