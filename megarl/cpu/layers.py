"""Layers on `cpu/layer_ops.py` and `cpu/attention.py`, for float32 on the CPU. Parameters are those of the plain ones."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.actor.model.norms import RMSNorm
from megarl.actor.model.packed_attention import PackedAttention, PackedRotary, PackedSequences
from megarl.cpu import layer_ops
from megarl.cpu.attention import packed_attention


class FusedRMSNorm(RMSNorm):
    """RMSNorm with its gradient in one pass."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return layer_ops.rms_norm(x, self.weight, self.eps)


class FusedSwiGLU(torch.nn.Module):
    """An MLP's gated activation: Megatron hands the halves over as one where `use_te_activation_func` is set."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return layer_ops.silu_mul(gate_up)


class CosSinRotary(PackedRotary):
    """Cosines and sines once for all layers. `FusedAttention` finds them in the packed sequences; Megatron is given
    no angles and rotates nothing."""

    def get_rotary_seq_len(self, *args: Any) -> Tensor:
        positions = super().get_rotary_seq_len(*args)
        angles = positions[:, None].float() * self.inv_freq
        args[4].cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return positions

    def forward(self, positions: Tensor, packed_seq: bool = True, cp_group: Any = None) -> None:  # type: ignore[override]
        return None


class FusedAttention(PackedAttention):
    """Attention that rotates queries and keys itself. Sequences that context parallelism cuts go in padded blocks."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **packed: Any
    ) -> Tensor:
        sequences: PackedSequences = packed["packed_seq_params"]
        assert sequences.cos_sin is not None
        query, key = (layer_ops.rotate(x, sequences.cos_sin) for x in (query, key))
        if self.cp is not None:
            return super().forward(query, key, value, attention_mask, packed_seq_params=sequences)
        assert sequences.sequences is not None
        return packed_attention(query, key, value, sequences.sequences, self.softmax_scale).flatten(1)
