"""Batched decode for SGLang's `torch_native` attention, which otherwise calls torch once for each sequence.

SGLang imports every module of this package in its scheduler; the backend keeps its name.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

log = logging.getLogger(__name__)

GATHERED_TOKENS = 65536  # keys and values gathered at once: bounds the memory of a decode step


@dataclass(frozen=True)
class Part:
    """Sequences of a decode step whose keys and values are gathered at once, the same for every layer."""

    rows: slice
    slots: torch.Tensor  # int64 [num_seqs * longest]: where their keys and values are
    bias: torch.Tensor  # [num_seqs, 1, 1, longest], -inf beyond a sequence's end


class BatchedDecodeBackend(TorchNativeAttnBackend):
    """`torch_native` with one attention over all sequences of a decode step."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before each step of the model: what all of its layers share."""
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_decode():
            table = self.req_to_token_pool.req_to_token
            self._parts = _parts(table, forward_batch.req_pool_indices, forward_batch.seq_lens)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """`query`, `output` `[num_seqs, heads, dim]`; the caches `[slots, kv_heads, dim]`; `seq_lens` `[num_seqs]`."""
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is not None or windowed:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        for part in self._parts:
            output[part.rows] = _attend(query[part.rows], k_cache, v_cache, part, scaling)
        return output


def _parts(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> list[Part]:
    """The sequences of a decode step in parts, each of at most `GATHERED_TOKENS` or a single sequence."""
    longest = int(seq_lens.max())
    step = max(1, GATHERED_TOKENS // longest)
    parts = []
    for i in range(0, len(seq_lens), step):
        rows = slice(i, i + step)
        slots = req_to_token[req_pool_indices[rows], :longest].long()
        beyond = torch.arange(longest) >= seq_lens[rows, None]
        # A stale slot may hold NaN, which a weight of 0 would let through: the first token's stands in for it.
        slots = torch.where(beyond, slots[:, :1], slots)
        bias = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
        parts.append(Part(rows, slots.flatten(), bias[:, None, None, :]))
    return parts


def _attend(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, part: Part, scaling: float | None
) -> torch.Tensor:
    """`[num_seqs, heads, dim]`: each query over its own keys and values. A group's queries share a key/value head."""
    num_seqs, heads, _ = query.shape
    kv_heads = k_cache.shape[1]
    keys, values = (
        cache.flatten(1).index_select(0, part.slots).view(num_seqs, -1, *cache.shape[1:]).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    grouped = query.view(num_seqs, kv_heads, heads // kv_heads, -1)
    found = scaled_dot_product_attention(
        grouped, keys.to(query.dtype), values.to(query.dtype), part.bias.to(query.dtype), scale=scaling
    )
    return found.reshape(num_seqs, heads, -1)


@register_attention_backend("torch_native")  # in place of SGLang's own
def create(runner: Any) -> BatchedDecodeBackend:
    """The backend of a model runner."""
    log.info("attention over a batch of sequences at once in decode steps")
    return BatchedDecodeBackend(runner)
