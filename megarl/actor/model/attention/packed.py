"""Attention and rotary positions over packed sequences, in plain torch.

Megatron's local `DotProductAttention` refuses packed sequences, and its rotary code splits them one by one. Here the
sequences of a microbatch are gathered into a few padded blocks of similar length. Each block is one call of
`scaled_dot_product_attention`, and rotary angles are looked up once per token. Sequences do not attend to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.actor.batch.context_parallel import Cut, LocalTokens, gather_keys_values
from megarl.actor.model.attention.windows_and_sinks import attend_in_window, attend_with_sinks, near, new_sinks

WHOLE = Cut()
MAX_MASKED_KEYS = 2048  # masks of longer sequences would take too much memory
CAUSAL_ROWS = 32  # torch's causal attention on the CPU takes this many queries at once, with all keys of the last one


@dataclass(frozen=True)
class Block:
    """Queries of sequences of similar length, padded to the longest, and the keys that they see.

    If `mask` is None, queries and keys are the same tokens, and attention is causal.
    """

    num_seqs: int
    length: int  # queries per sequence, padding included
    queries: Tensor  # int64 [num_seqs * length]: local token of each slot; padding repeats the sequence's last one
    valid: Tensor  # int64: slots with real tokens
    keys: Tensor  # int64 [num_seqs * key length]: rows among the tokens of all cp ranks
    mask: Tensor | None  # bool [num_seqs, 1, length, key length]: True where the query sees the key
    positions: Tensor | None = None  # int64 [num_seqs, length]: positions of queries under a mask, for windows


@dataclass
class PackedBlocks(PackedSeqParams):
    """A packed microbatch as padded blocks of similar lengths, for `PackedAttention`.

    Megatron's `cu_seqlens_*` stay None, so its rotary code takes one angle per token.
    """

    positions: Tensor | None = None  # int64 [local tokens]: position of each token in its sequence
    blocks: list[Block] = field(default_factory=list)
    restore: Tensor | None = None  # int64 [local tokens]: index of each token in the blocks' order


@dataclass
class PackedBounds(PackedSeqParams):
    """A packed microbatch by its sequence bounds, for Transformer Engine's attention."""

    positions: Tensor | None = None  # int64 [longest sequence]: 0, 1, ..., rows of the table of rotary angles


def pack_in_blocks(
    cu_seqlens: Tensor, device: torch.device, cut: Cut = WHOLE, shared: LocalTokens | None = None
) -> PackedBlocks:
    """Plans attention over packed sequences, in padded blocks, on the host.

    A block holds chunks of lengths in (2^(k-1), 2^k], so less than half of it is padding. On the CPU, queries of a
    prompt computed by another sequence are skipped if that is cheaper (`_skipped_queries`).

    Args:
        cu_seqlens: int32 `[num_seqs + 1]`, on the host, padded by `cut.padded_cu_seqlens`.
        device: the device that will compute.
        cut: this rank's share of the tokens.
        shared: the tokens that the model reads under shared prompts; only without a cut.
    """
    starts, sizes = cu_seqlens.long()[:-1] // cut.cp_size, cut.chunk_lengths(cu_seqlens)
    total = int(cu_seqlens[-1]) // cut.cp_size
    is_read, local_index, skipped = torch.ones(total, dtype=torch.bool), torch.arange(total), torch.zeros_like(sizes)
    if shared is not None:
        is_read, local_index = torch.zeros_like(is_read).index_fill_(0, shared.source, True), shared.rows
        skipped = _skipped_queries(sizes, is_read) if device.type == "cpu" else skipped
    query_counts = sizes - skipped
    classes = _size_class(sizes) * 64 + _size_class(query_counts)
    positions = torch.empty(int(is_read.sum()), dtype=torch.long)
    blocks, order = [], []
    for half, chunk in enumerate(cut.my_chunks()):
        for value in classes[query_counts > 0].unique().tolist():
            members = ((classes == value) & (query_counts > 0)).nonzero().squeeze(1)
            size, count, length = sizes[members, None], query_counts[members, None], int(query_counts[members].max())
            slots = skipped[members, None] + torch.minimum(torch.arange(length), count - 1)
            queries = starts[members, None] + half * size + slots
            valid = ((torch.arange(length) < count) & is_read[queries]).flatten().nonzero().squeeze(1)
            queries = local_index[queries]
            query_positions = chunk * size + slots
            order.append(queries.flatten()[valid])
            positions[order[-1]] = query_positions.flatten()[valid]
            keys, mask, mask_positions = queries, None, None
            if cut.cp_size > 1 or bool((count < size).any()):
                key_length = (chunk + 1) * int(size.max())
                key_slots = torch.minimum(torch.arange(key_length), (chunk + 1) * size - 1)
                keys = cut.rows(cu_seqlens, members[:, None].expand_as(key_slots), key_slots)
                keys = keys if shared is None else local_index[keys]
                mask = (torch.arange(key_length) <= query_positions[..., None])[:, None]
                mask_positions = query_positions
            indices = queries.flatten(), valid.flatten(), keys.flatten()
            blocks.append(Block(len(members), length, *indices, mask, mask_positions))
    block_order = torch.cat(order) if order else torch.empty(0, dtype=torch.long)
    restore = torch.empty_like(block_order)
    restore[block_order] = torch.arange(len(block_order))
    return PackedBlocks(qkv_format="thd", positions=positions, blocks=blocks, restore=restore)


def _size_class(sizes: Tensor) -> Tensor:
    """Computes k for sizes in (2^(k-1), 2^k], int64; 0 for sizes up to 1."""
    return sizes.clamp(min=1).double().log2().ceil().long()


def _skipped_queries(sizes: Tensor, is_read: Tensor) -> Tensor:
    """Number of skipped queries at the start of each sequence, int64 `[num_seqs]`.

    Queries of a shared prompt are skipped where masked attention over the rest is cheaper: it then has fewer scores
    than causal attention over all. Tokens that the model reads (`is_read`, bool `[tokens]`) are never skipped.
    """
    ends = sizes.cumsum(0)
    read_before = torch.nn.functional.pad(is_read.long().cumsum(0), (1, 0))
    rest = read_before[ends] - read_before[ends - sizes]
    return torch.where((2 * rest < sizes + CAUSAL_ROWS) & (sizes <= MAX_MASKED_KEYS), sizes - rest, 0)


def pack_with_bounds(
    cu_seqlens: Tensor, device: torch.device, cut: Cut = WHOLE, shared: LocalTokens | None = None
) -> PackedBounds:
    """Plans attention over packed sequences for Transformer Engine, by their bounds.

    Transformer Engine itself cuts padded sequences in zigzag order. The positions give one table of rotary angles, from
    which Megatron's rotary code takes each rank's part.
    """
    longest = int(cu_seqlens.diff().max())
    return PackedBounds(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=torch.arange(longest),
    )


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences: Megatron's `core_attention` for the local layer spec.

    Under context parallelism every rank gathers the keys and values of all ranks.
    """

    def __init__(
        self,
        config: Any,
        *,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        window: int = 0,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        """Builds a layer's attention, with a sliding window of `window` tokens (0: none) and a sink for each head."""
        super().__init__()
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.cp = pg_collection.cp if config.context_parallel_size > 1 else None
        self.window = window
        self.softmax_offset = new_sinks(config) if sinks else None  # Transformer Engine's name

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
        """Computes `[tokens, heads * dim]` of query `[tokens, heads, dim]`, key and value `[tokens, kv_heads, dim]`."""
        if self.cp is not None:
            key, value = gather_keys_values(key, value, self.cp)
        outputs = []
        for block in packed_seq_params.blocks:
            q = _padded(query, block.queries, block.num_seqs)
            k, v = (_padded(x, block.keys, block.num_seqs) for x in (key, value))
            out = self._attend_block(q, k, v, block)
            flat = out.transpose(1, 2).reshape(block.num_seqs * block.length, -1)
            outputs.append(flat.index_select(0, block.valid))
        assert packed_seq_params.restore is not None
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, packed_seq_params.restore)

    def _attend_block(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Tensor:
        """Computes attention of one block, in the layer's window."""
        mask = block.mask
        if self.window and mask is None:
            return attend_in_window(self.attend, query, key, value, self.window)
        if self.window and mask is not None and block.positions is not None and key.shape[2] > self.window:
            keys = torch.arange(key.shape[2], device=mask.device)
            mask = mask & near(block.positions, keys, self.window)[:, None]
        return self.attend(query, key, value, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Computes attention `[num_seqs, heads, length, dim]` under a mask; causal attention if it is None."""
        if self.softmax_offset is not None:
            return attend_with_sinks(query, key, value, mask, self.softmax_scale, self.softmax_offset)
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
    """Gathers `[num_seqs, heads, length, dim]` from `rows` of `values [tokens, heads, dim]`."""
    return values.index_select(0, rows).view(num_seqs, -1, *values.shape[1:]).transpose(1, 2)


class PackedRotary(torch.nn.Module):
    """Rotary angles per token, replacing Megatron's `RotaryEmbedding`.

    `inv_freq` `[dim / 2]` comes from transformers, so that scaled variants (llama3, linear) match the checkpoint. Of
    several tables `[tables, dim / 2]`, the angles stand beside each other, and each layer takes its own.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def get_rotary_seq_len(self, *args: Any) -> Tensor:
        """Returns the packed positions. Megatron asks for a length here and passes the result to `forward`."""
        positions = args[4].positions
        assert positions is not None
        return positions

    def forward(self, positions: Tensor, packed_seq: bool = True, cp_group: Any = None) -> Tensor:
        """Computes angles `[tokens, 1, tables * dim]` for positions `[tokens]`."""
        positions = positions.to(self.inv_freq.device).float()
        angles = positions.view(-1, *[1] * self.inv_freq.dim()) * self.inv_freq
        return torch.cat((angles, angles), dim=-1).flatten(1)[:, None, :]


class OwnRotaryAttention(SelfAttention):
    """Self-attention that takes the angles of its own table, where layers differ in their rotary positions."""

    def __init__(self, *args: Any, table: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dim = self.config.kv_channels
        self.own_angles = slice(table * dim, (table + 1) * dim)

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        """Attends with angles `[tokens, 1, tables * dim]`."""
        assert rotary_pos_emb is not None
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[..., self.own_angles].contiguous(), **kwargs)


class RotaryTable(PackedRotary):
    """Rotary angles by position in a sequence, for sequences given by their bounds (`PackedBounds`)."""

    def forward(self, positions: Tensor, packed_seq: bool = True, cp_group: Any = None) -> Tensor:
        """Computes angles `[longest, 1, 1, dim]`, the shape that Megatron and Transformer Engine take for `thd`."""
        return super().forward(positions)[:, None]
