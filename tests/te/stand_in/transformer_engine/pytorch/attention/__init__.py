"""Attention over packed sequences, one call of SDPA a sequence, and over ranks in zigzag order."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from transformer_engine.pytorch.distributed import exchange
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.signatures import taken


class DotProductAttention(TransformerEngineBaseModule):
    """Causal attention in the format `thd`; the checks of its arguments are the real module's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        names = (
            "num_attention_heads kv_channels num_gqa_groups attention_dropout attn_mask_type sequence_parallel "
            "get_rng_state_tracker tp_size tp_group layer_number attention_type softmax_scale "
            "cp_group cp_global_ranks cp_stream cp_comm_type window_size softmax_type"
        )
        a = taken("DotProductAttention.__init__", names, args, kwargs)
        assert a.attention_dropout == 0.0, "the stand-in of Transformer Engine has no dropout"
        assert a.attention_type == "self", a.attention_type
        self.tp_size = a.tp_size if a.tp_group is None else a.tp_group.size()
        self.num_gqa_groups = a.num_gqa_groups or a.num_attention_heads
        assert a.num_attention_heads % self.num_gqa_groups == 0
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        self.head_dim = a.kv_channels
        self.softmax_scale = a.softmax_scale or a.kv_channels**-0.5
        self.cp_group, self.cp_comm_type, self.tp_group = a.cp_group, a.cp_comm_type, a.tp_group
        assert a.window_size is None or a.window_size[1] == 0, "causal attention sees no token after its own"
        self.tokens_before = a.window_size[0] if a.window_size is not None else None
        assert a.softmax_type in ("vanilla", "learnable"), a.softmax_type
        self.softmax_offset = None
        if a.softmax_type == "learnable":  # float32 and without a mark, as the real one's
            self.softmax_offset = torch.nn.Parameter(torch.zeros(a.num_attention_heads // self.tp_size))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        names = (
            "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv "
            "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type pad_between_seqs"
        )
        a = taken("DotProductAttention.forward", names, args, kwargs)
        query, key, value, bounds = a.query_layer, a.key_layer, a.value_layer, a.cu_seqlens_q
        assert a.qkv_format == "thd", f"the stand-in of Transformer Engine lacks qkv_format={a.qkv_format}"
        assert all(x.dim() == 3 for x in (query, key, value)), "Queries, keys and values must be 3D tensors"
        assert query.dtype == key.dtype == value.dtype
        assert key.shape[-2] == self.num_gqa_groups_per_partition, (key.shape, self.num_gqa_groups_per_partition)
        assert query.shape[-1] == key.shape[-1] == self.head_dim
        assert a.attn_mask_type == "padding_causal", a.attn_mask_type
        assert bounds.dtype == a.cu_seqlens_kv.dtype == torch.int32
        assert bounds.device == query.device
        assert torch.equal(bounds, a.cu_seqlens_kv), "self-attention"
        for padded in (a.cu_seqlens_q_padded, a.cu_seqlens_kv_padded):
            assert padded is None or torch.equal(padded, bounds), "the stand-in lacks padding between sequences"
        assert a.max_seqlen_q == a.max_seqlen_kv == int(bounds.diff().max())
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        assert int(bounds[-1]) == query.shape[0] * cp_size, "bounds are of all ranks' tokens"
        plain = self.tokens_before is None and self.softmax_offset is None
        assert plain or cp_size == 1, "get_attention_backend finds none for windows or sinks over ranks by p2p"
        if not plain:
            parts = [self._in_window(*(x[a:b] for x in (query, key, value))) for a, b in _pairs(bounds)]
            return torch.cat(parts).reshape(query.shape[0], -1)
        if cp_size == 1:
            out = [self._attend(*(x[a:b] for x in (query, key, value)), None) for a, b in _pairs(bounds)]
        else:
            out = self._over_ranks(query, key, value, bounds)
        return torch.cat(out).reshape(query.shape[0], -1)

    def _over_ranks(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> list[Tensor]:
        """Attention of this rank's two chunks of each sequence, among the 2 * cp chunks of all ranks."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        gathered = [
            exchange(x, self.cp_group, "all_gather", "reduce_scatter").view(size, *x.shape) for x in (key, value)
        ]
        out = []
        for first, last in _pairs(bounds):
            assert (last - first) % (2 * size) == 0, f"a sequence of {last - first} tokens over {size} ranks"
            chunk, start = (last - first) // (2 * size), first // size
            parts = [(i, 0) if i < size else (2 * size - 1 - i, 1) for i in range(2 * size)]  # rank and its half
            whole = [torch.cat([x[r, start + h * chunk :][:chunk] for r, h in parts]) for x in gathered]
            places = torch.cat([torch.arange(chunk) + i * chunk for i in (rank, 2 * size - 1 - rank)])
            seen = torch.arange(last - first) <= places[:, None]
            out.append(self._attend(query[start : start + 2 * chunk], *whole, seen))
        return out

    def _in_window(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of a sequence by its full table of scores, with the sinks as a further column."""
        length, groups = query.shape[0], query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = distance < 0 if self.tokens_before is None else (distance < 0) | (distance > self.tokens_before)
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.softmax_scale
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.to(scores.dtype)[:, None, None].expand(-1, length, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.shape[0] == 0:
            return query
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        options = {"scale": self.softmax_scale, "enable_gqa": k.shape[1] != q.shape[1]}
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **options)
        return out[0].transpose(0, 1)


def _pairs(bounds: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(bounds.tolist()))
