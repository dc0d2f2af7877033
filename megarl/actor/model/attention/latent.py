"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over packed sequences.

Queries, and keys with values, pass through a narrow latent vector of a token. Rotary positions turn a part of each
query, and one key part that all heads share.

Megarl has a module of its own, because Megarl's layouts need more than Megatron's `MLASelfAttention` offers:

- It refuses every class but its own for the projections to latents (multi_latent_attention.py:532).
- With tensor parallelism, and without Transformer Engine under sequence parallelism, the gradient of the shared key
  part is that of the rank's own heads (multi_latent_attention.py:714).
- Its fused rotation takes heads of a power of two only (fused_mla_yarn_rope_apply.py:441), which GLM-4.7-Flash lacks.

Parameters have Megatron's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.families.blocks import LatentAttention


@dataclass(frozen=True)
class LatentParts:
    """Classes or builders of the module's parts, from the layer backend."""

    down: Any  # linear layer to a latent vector, complete on every tp rank
    up: Any  # column-parallel linear layer
    norm: Any
    core: Any  # attention over packed sequences
    out: Any  # row-parallel linear layer


class ReplicatedLinear(torch.nn.Linear):
    """Linear layer without bias that every tp rank holds completely.

    Under sequence parallelism each rank sees only its own tokens, and Megatron sums the gradients over tp.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (torch does not declare it)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Computes `[..., output]`, and returns no bias, as Megatron's layers do."""
        return super().forward(x), None


class LatentSelfAttention(MegatronModule):
    """Latent attention of one layer, for Megatron's `TransformerLayer`.

    The core attention gets values padded with zeros to the size of queries: flash attention takes one size for both.
    """

    def __init__(
        self,
        config: TransformerConfig,
        shape: LatentAttention,
        parts: LatentParts,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        **_: Any,
    ) -> None:
        """Builds this rank's part of the layer; `shape` is the block `LatentAttention`."""
        super().__init__(config)
        assert not config.multi_latent_attention, "that is Megatron's own module"
        self.shape, self.tp, self.cp = shape, pg_collection.tp, pg_collection.cp
        self.local_heads = shape.heads // self.tp.size()
        # Transformer Engine shares its buffers for overlapped communication by these names.
        common = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        column = {**common, "gather_output": False, "is_expert": False, "tp_group": self.tp}
        query_rows, hidden = shape.q_size, config.hidden_size
        if shape.query_rank:
            self.linear_q_down_proj = parts.down(hidden, shape.query_rank, **common)
            self.q_layernorm = parts.norm(config=config, hidden_size=shape.query_rank, eps=shape.norm_eps)
            self.linear_q_up_proj = parts.up(shape.query_rank, query_rows, **column, tp_comm_buffer_name="q_up_proj")
        else:
            self.linear_q_proj = parts.up(hidden, query_rows, **column, tp_comm_buffer_name="q_proj")
        self.linear_kv_down_proj = parts.down(hidden, shape.kv_rank + shape.rotary_dim, **common)
        self.kv_layernorm = parts.norm(config=config, hidden_size=shape.kv_rank, eps=shape.norm_eps)
        self.linear_kv_up_proj = parts.up(shape.kv_rank, shape.kv_rows, **column, tp_comm_buffer_name="kv_up_proj")
        self.core_attention = parts.core(  # its heads have `config.kv_channels`, which is a key's size
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            softmax_scale=shape.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = parts.out(
            shape.heads * shape.value_dim,
            hidden,
            **{**common, "init_method": config.output_layer_init_method, "skip_bias_add": True},
            input_is_parallel=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.tp,
        )
        modules = config.recompute_modules or []
        self.recomputes_core = config.recompute_granularity == "selective" and "core_attn" in modules

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes `[tokens, 1, hidden]` of this shape; under sequence parallelism tokens are split over tp."""
        query, key, value = self._project(hidden_states, rotary_pos_emb, packed_seq_params)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = self.core_attention(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=AttnMaskType.causal,
                packed_seq_params=packed_seq_params,
            )
            return out

        if self.recomputes_core and self.training:
            attended = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            attended = attend(query, key, value)
        heads = attended.reshape(attended.shape[0], self.local_heads, -1)[..., : self.shape.value_dim]
        output: tuple[Tensor, Tensor | None] = self.linear_proj(heads.reshape(heads.shape[0], 1, -1))
        return output

    def _project(self, hidden: Tensor, angles: Tensor, packed: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Computes query, key and value `[tokens, local heads, head_dim]`, rotated."""
        shape = self.shape
        if shape.query_rank:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)[0]))
        else:
            query, _ = self.linear_q_proj(hidden)
        latent, key_rotary = self.linear_kv_down_proj(hidden)[0].split([shape.kv_rank, shape.rotary_dim], dim=-1)
        # The key part is read by the heads of all ranks: its gradients are summed over tp.
        if self.config.sequence_parallel:
            key_rotary = gather_from_sequence_parallel_region(key_rotary, group=self.tp)
        else:
            key_rotary = copy_to_tensor_model_parallel_region(key_rotary, group=self.tp)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent.contiguous()))
        tokens = query.shape[0]
        query = query.view(tokens, self.local_heads, shape.head_dim)
        key_value = key_value.view(tokens, self.local_heads, shape.plain_dim + shape.value_dim)
        query_plain, query_rotary = query.split([shape.plain_dim, shape.rotary_dim], dim=-1)
        key_plain, value = key_value.split([shape.plain_dim, shape.value_dim], dim=-1)
        angles = angles[..., : shape.rotary_dim // 2].repeat_interleave(2, dim=-1)
        query_rotary = self._rotate(query_rotary, angles, packed)
        key_rotary = self._rotate(key_rotary, angles, packed).expand(-1, self.local_heads, -1)
        query = torch.cat((query_plain, query_rotary), dim=-1)
        key = torch.cat((key_plain, key_rotary), dim=-1)
        return query, key, F.pad(value, (0, shape.head_dim - shape.value_dim))

    def _rotate(self, x: Tensor, angles: Tensor, packed: Any) -> Tensor:
        """Rotates neighbouring elements of `[tokens, heads, rotary_dim]` by the angles of the tokens' positions."""
        bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        if bounds is None:  # one angle per token; Megatron then wants a dimension for the batch
            x, angles = x[:, None], angles[:, None]
        rotated: Tensor = apply_rotary_pos_emb(x, angles, config=self.config, cu_seqlens=bounds, cp_group=self.cp)
        rotated = rotated[:, 0] if bounds is None else rotated
        scale = self.shape.rotary_scale
        return rotated if scale == 1.0 else rotated * scale
