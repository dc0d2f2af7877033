"""Batched decode for SGLang's `torch_native` attention, which otherwise calls torch once for each sequence.

SGLang imports every module of this package in its scheduler; the backend keeps its name.
"""

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

log = logging.getLogger(__name__)

GATHERED_TOKENS = 65536  # keys and values gathered at once: bounds the memory of a decode step


class BatchedDecodeBackend(TorchNativeAttnBackend):
    """`torch_native` with one masked batched matmul over the sequences of a decode step."""

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
        longest = int(seq_lens.max())
        step = max(1, GATHERED_TOKENS // longest)
        for i in range(0, len(seq_lens), step):
            part = slice(i, i + step)
            slots = req_to_token[req_pool_indices[part], :longest]
            output[part] = _attend(query[part], k_cache, v_cache, slots, seq_lens[part], scaling)
        return output


def _attend(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """`[num_seqs, heads, dim]`: each query over its own keys and values, those at `slots [num_seqs, longest]`."""
    num_seqs, heads, dim = query.shape
    kv_heads = k_cache.shape[1]
    beyond = torch.arange(slots.shape[1]) >= seq_lens[:, None]
    slots = slots.masked_fill(beyond, 0)  # a stale slot may hold NaN, which a masked weight of 0 would let through
    keys = k_cache[slots].to(query.dtype).permute(0, 2, 3, 1)
    values = v_cache[slots].to(query.dtype).transpose(1, 2).masked_fill(beyond[:, None, :, None], 0.0)
    scores = query.view(num_seqs, kv_heads, heads // kv_heads, dim) @ keys * (scaling or dim**-0.5)
    scores.masked_fill_(beyond[:, None, None, :], float("-inf"))
    return (scores.softmax(-1) @ values).view(num_seqs, heads, -1)


@register_attention_backend("torch_native")  # in place of SGLang's own
def create(runner: Any) -> BatchedDecodeBackend:
    """The backend of a model runner."""
    log.info("attention over a batch of sequences at once in decode steps")
    return BatchedDecodeBackend(runner)
