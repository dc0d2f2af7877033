"""Megatron layers on the float32 CPU kernels. Parameters have the names and shapes of the plain layers.

The backend `cpu` of `megarl/actor/model/backends.py` puts them into a model. Base classes are handed in: this folder
imports nothing of the actor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.cpu import layer_ops
from megarl.cpu.attention import Sequences, packed_attention


@dataclass
class PackedForKernel(PackedSeqParams):
    """Parameters of the fused attention for a packed microbatch: rotary table and sequence bounds.

    Sequences that context parallelism cuts go through the plain attention; `plain` holds its parameters then.
    """

    cos_sin: Tensor | None = None  # float32 [local tokens, dim]: cosines, then sines, of each token's position
    sequences: Sequences | None = None
    plain: PackedSeqParams | None = None


def packing(plain_pack: Callable[..., Any], inv_freq: Tensor) -> Callable[..., PackedForKernel]:
    """The `pack` of the backend, for rotary frequencies `[dim / 2]`; cut sequences are packed by `plain_pack`."""

    def pack(cu_seqlens: Tensor, device: torch.device, cut: Any, shared: Any) -> PackedForKernel:
        if cut.cp_size > 1:
            plain = plain_pack(cu_seqlens, device, cut, shared)
            return PackedForKernel(qkv_format="thd", cos_sin=_cos_sin(plain.positions, inv_freq), plain=plain)
        lengths, tokens = cu_seqlens.diff().long(), torch.arange(int(cu_seqlens[-1]))
        positions = tokens - cu_seqlens[:-1].long().repeat_interleave(lengths)
        if shared is None:
            sequences = Sequences(cu_seqlens, tokens, torch.zeros_like(lengths))
        else:  # queries are the tokens that the model reads; a shared prompt's tokens stay keys of each sequence
            before = torch.searchsorted(shared.source, cu_seqlens.long())  # tokens read before each bound
            sequences = Sequences(cu_seqlens, shared.rows, lengths - before.diff())
            positions = positions[shared.source]
        return PackedForKernel(qkv_format="thd", cos_sin=_cos_sin(positions, inv_freq), sequences=sequences)

    return pack


def _cos_sin(positions: Tensor, inv_freq: Tensor) -> Tensor:
    angles = positions[:, None].float() * inv_freq.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class NoRotary(torch.nn.Module):
    """Stands where Megatron expects rotary angles and gives none: the fused attention rotates by `cos_sin`."""

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Returns 0: Megatron asks for a length and hands it to `forward`."""
        return 0

    def forward(self, length: int, packed_seq: bool = True, cp_group: Any = None) -> None:
        """Returns no angles, so that Megatron rotates nothing."""


class FusedSwiGLU(torch.nn.Module):
    """Gated activation of an MLP, `silu(gate) * up`, of both halves in one tensor."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        """`[..., 2 * width]` to `[..., width]`."""
        return layer_ops.silu_mul(gate_up)


def fused_rms_norm(plain: type[torch.nn.RMSNorm]) -> type[torch.nn.RMSNorm]:
    """A subclass of `plain`, whose `gain()` is its weight, that computes values and gradients in one pass each."""

    class FusedRMSNorm(plain):  # type: ignore[valid-type,misc]
        def forward(self, x: Tensor) -> Tensor:
            assert self.eps is not None
            return layer_ops.rms_norm(x, self.gain(), self.eps)

    return FusedRMSNorm


def fused_attention(plain: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of the packed attention `plain` that rotates queries and keys and attends in one kernel.

    Sequences cut by context parallelism are rotated here and attended by `plain`.
    """

    class FusedAttention(plain):  # type: ignore[valid-type,misc]
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **packed: Any
        ) -> Tensor:
            """query `[tokens, heads, dim]`, key and value `[tokens, kv_heads, dim]` -> `[tokens, heads * dim]`."""
            batch: PackedForKernel = packed["packed_seq_params"]
            assert batch.cos_sin is not None
            query, key = (_rotated(x, batch.cos_sin) for x in (query, key))
            if batch.plain is not None:
                return super().forward(query, key, value, attention_mask, packed_seq_params=batch.plain)
            assert batch.sequences is not None
            return packed_attention(query, key, value, batch.sequences, self.softmax_scale).flatten(1)

    return FusedAttention


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates the first elements of each head, as many as `cos_sin` has."""
    rotary = cos_sin.shape[-1]
    if rotary == x.shape[-1]:
        return layer_ops.rotate(x, cos_sin)
    return torch.cat((layer_ops.rotate(x[..., :rotary], cos_sin), x[..., rotary:]), -1)
