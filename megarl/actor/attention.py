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


@dataclass(frozen=True)
class Block:
    """Sequences of similar length, padded to the longest.

    `gather` int64 `[num_seqs * length]` is the token that each padded slot holds (padding repeats the sequence's last
    token), `valid` int64 are the slots that hold real tokens.
    """

    num_seqs: int
    length: int
    gather: Tensor
    valid: Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """What Megatron hands to attention and rotary code for one packed microbatch.

    Megatron's own `cu_seqlens_*` stay None, so that its rotary code takes one angle per token.
    """

    positions: Tensor | None = None  # int64 [tokens]: place of each token in its sequence
    blocks: list[Block] = field(default_factory=list)
    restore: Tensor | None = None  # int64 [tokens]: from the blocks' order back to token order


def packed_sequences(cu_seqlens: Tensor) -> PackedSequences:
    """Plans attention for sequences laid end to end; `cu_seqlens` is int32 `[num_seqs + 1]`.

    A block holds lengths in (2^(k-1), 2^k], so that less than half of it is padding.
    """
    device = cu_seqlens.device
    starts = cu_seqlens[:-1].long().cpu()
    lengths = cu_seqlens.diff().long().cpu()
    total = int(cu_seqlens[-1])
    positions = torch.arange(total) - starts.repeat_interleave(lengths)
    classes = (lengths.clamp(min=1) - 1).double().add(1).log2().ceil().long()
    blocks, order = [], []
    for value in classes[lengths > 0].unique().tolist():
        members = ((classes == value) & (lengths > 0)).nonzero().squeeze(1)
        length = int(lengths[members].max())
        slots = torch.arange(length)
        gather = starts[members, None] + torch.minimum(slots, lengths[members, None] - 1)
        valid = (slots < lengths[members, None]).flatten().nonzero().squeeze(1)
        order.append(gather.flatten()[valid])
        blocks.append(Block(len(members), length, gather.flatten().to(device), valid.to(device)))
    order_all = torch.cat(order) if order else torch.empty(0, dtype=torch.long)
    restore = torch.empty_like(order_all)
    restore[order_all] = torch.arange(len(order_all))
    longest = int(lengths.max()) if len(lengths) else 0
    return PackedSequences(
        qkv_format="thd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions.to(device),
        blocks=blocks,
        restore=restore.to(device),
    )


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences: Megatron's `core_attention` for the local layer spec."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """query `[tokens, heads, dim]`, key and value `[tokens, kv_heads, dim]` -> `[tokens, heads * dim]`."""
        outputs = []
        for block in packed_seq_params.blocks:
            shape = (block.num_seqs, block.length)
            q, k, v = (
                x.index_select(0, block.gather).view(*shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
            )
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=k.shape[1] != q.shape[1]
            )
            flat = out.transpose(1, 2).reshape(block.num_seqs * block.length, -1)
            outputs.append(flat.index_select(0, block.valid))
        assert packed_seq_params.restore is not None
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, packed_seq_params.restore)


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
