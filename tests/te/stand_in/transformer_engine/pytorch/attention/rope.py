"""Rotary positions of packed sequences."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from transformer_engine.signatures import taken


def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Tensor:
    """Rotates `t [tokens, heads, dim]` by `freqs [longest, 1, 1, dim]`; under cp, in zigzag order."""
    a = taken(
        "attention.rope.apply_rotary_pos_emb",
        "t freqs tensor_format interleaved fused cu_seqlens cp_size cp_rank",
        args,
        kwargs,
    )
    assert a.fused, "the stand-in of Transformer Engine lacks the unfused function"
    assert a.tensor_format == "thd", a.tensor_format
    assert a.freqs.dim() == 4, "expected 4D tensor"
    assert a.freqs.shape[1] == a.freqs.shape[2] == 1
    assert a.freqs.dtype == torch.float32, "Dtype of the freqs tensor must be float"
    places = []
    for first, last in itertools.pairwise((a.cu_seqlens // a.cp_size).tolist()):
        length = last - first
        if a.cp_size == 1:
            places.append(torch.arange(length))
        else:
            chunk = length // 2
            places += [torch.arange(chunk) + i * chunk for i in (a.cp_rank, 2 * a.cp_size - 1 - a.cp_rank)]
    angles = a.freqs[torch.cat(places), 0]
    half = angles.shape[-1] // 2
    turned, rest = a.t[..., : 2 * half].float(), a.t[..., 2 * half :]
    if a.interleaved:  # neighbours turn together, each by the angle at its own place
        crossed = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        crossed = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    return torch.cat(((turned * angles.cos() + crossed * angles.sin()).to(a.t.dtype), rest), dim=-1)
