"""Batched decode for SGLang's `torch_native` attention, which calls torch once for each sequence.

A cache in 8 bits is widened for each call, with scales of 1. It is for tests: it saves no time.

SGLang imports every module of this package in its scheduler. The backend keeps SGLang's name.
"""

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from megarl.cpu import decode

log = logging.getLogger(__name__)


class BatchedDecodeBackend(TorchNativeAttnBackend):
    """SGLang's `torch_native` backend with one attention call over all sequences of a decode step."""

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
        k_cache, v_cache = _widened(k_cache, query.dtype), _widened(v_cache, query.dtype)
        supported = (
            query.dtype in decode.ATTENTION_DTYPES and query.shape[2] % decode.LANES == 0 and encoder_lens is None
        )
        if not supported or k_cache.dtype != query.dtype or k_cache.shape != v_cache.shape:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        scale = query.shape[2] ** -0.5 if scaling is None else scaling
        window = 0 if sliding_window_size is None else sliding_window_size + 1  # SGLang does not count the token itself
        output[:] = decode.paged_attention(
            query, k_cache, v_cache, req_to_token, req_pool_indices.long(), seq_lens.long() - 1, scale, window
        )  # fmt: skip
        return output

    def _run_sdpa_forward_extend(
        self, query: torch.Tensor, output: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        caches = _widened(k_cache, query.dtype), _widened(v_cache, query.dtype)
        return super()._run_sdpa_forward_extend(query, output, *caches, *args, **kwargs)


def _widened(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return cache.to(dtype) if cache.itemsize == 1 else cache


@register_attention_backend("torch_native")  # in place of SGLang's own
def create(runner: Any) -> BatchedDecodeBackend:
    """Builds the backend of a model runner."""
    log.info("attention over a batch of sequences at once in decode steps")
    return BatchedDecodeBackend(runner)
