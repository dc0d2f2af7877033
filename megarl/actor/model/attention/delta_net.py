"""Gated delta net: Megatron's `self_attention` for layers with a recurrent state in place of attention.

Parameters have the names and layout of Megatron's `GatedDeltaNet` (megatron/core/ssm/gated_delta_net). Rows of
`in_proj` on each tensor-parallel rank are query, key, value, z, beta and alpha. That module itself needs
flash-linear-attention on every machine, keeps the decay in bfloat16, and waits for the GPU in every layer. Under
zero-centered norms it adds 1 to the weight of its output norm, and without sequence parallelism it does not sum that
weight's gradient over tp.

Under context parallelism, an all-to-all gives each rank all tokens of some heads, and a second one brings them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net as megatron_delta_net
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.actor.batch.context_parallel import Cut, LocalTokens
from megarl.actor.model.attention.delta_rule import (
    WHOLE,
    Recurrence,
    causal_convolution,
    gated_delta_rule,
    plan_recurrence,
    unit_length,
)
from megarl.families.blocks import DeltaNet
from megarl.knobs import UserError


def check_kernels() -> None:
    """Refuses a missing flash-linear-attention, and versions whose kernels Megatron does not find.

    Raises:
        UserError: they do not load.
    """
    if not megatron_delta_net.HAVE_FLA:
        raise UserError(
            "actor.backend=te runs gated delta nets on kernels of the package fla-core, which do not load here; "
            "install the version that Megatron imports (pip install fla-core==0.5.2), or set actor.backend=torch"
        )


def with_recurrence(pack: Callable[..., Any]) -> Callable[..., Any]:
    """Extends a backend's `pack` by the plan that `PackedDeltaNet` reads, as the attribute `recurrence`."""

    def packed(
        cu_seqlens: Tensor, device: torch.device, cut: Cut = WHOLE, shared: LocalTokens | None = None
    ) -> PackedSeqParams:
        result: PackedSeqParams = pack(cu_seqlens, device, cut, shared)
        setattr(result, "recurrence", plan_recurrence(cu_seqlens, device, cut, shared))  # noqa: B010 (Megatron's class)
        return result

    return packed


class GatedRMSNorm(nn.Module):
    """RMSNorm of each head's output, times silu of its gate. The weight is float32 and not zero-centered."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor, group: Any) -> Tensor:
        """Computes `[tokens, heads, width]`. Each rank of `group` has other heads; weight gradients are summed."""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=group)
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
        return (weight * normed * F.silu(gate.float())).to(x.dtype)


class ConvolutionWeight(nn.Module):
    """Weight `[channels, 1, width]` of the causal convolution, named as in torch's `Conv1d`."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype))

    def forward(self) -> Tensor:
        """Returns the weight. With `parallel.overlap` the hook before it gathers what the last step changed."""
        return self.weight


class PackedDeltaNet(MegatronModule):
    """Gated delta net over packed sequences, which do not see each other.

    `fused` takes the kernels of flash-linear-attention; otherwise plain torch is used (`delta_rule.py`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: DeltaNet,
        column_linear: Any,
        row_linear: Any,
        fused: bool,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.sizes, self.fused = layer_number, sizes, fused
        self.tp, self.cp = pg_collection.tp, pg_collection.cp
        tp_size = self.tp.size()
        self.local = sizes.sections(tp_size)
        self.in_proj = column_linear(
            config.hidden_size,
            sum(self.local) * tp_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=self.tp,
        )
        self.conv1d = ConvolutionWeight(sum(self.local[:3]), sizes.conv_width, config.params_dtype)
        self.dt_bias = nn.Parameter(torch.empty(self.local[4], dtype=config.params_dtype))
        self.A_log = nn.Parameter(torch.empty(self.local[4], dtype=torch.float32))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.out_norm = GatedRMSNorm(sizes.value_dim, config.layernorm_epsilon)
        self.out_proj = row_linear(
            self.local[3] * tp_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp,
        )

    def forward(self, hidden_states: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> tuple[Tensor, None]:
        """Computes `[tokens, 1, hidden]` from `[tokens, 1, hidden]`."""
        plan: Recurrence = packed_seq_params.recurrence
        projected, _ = self.in_proj(hidden_states)
        projected = self._in_order(projected.squeeze(1), plan)
        qkv, z, beta, alpha = projected.split(self._widths(self.local), -1)
        query, key, value = self._convolved(qkv, plan)
        decay = -self._own(self.A_log).exp() * F.softplus(alpha.float() + self._own(self.dt_bias).float())
        out = self._rule(query, key, value, decay, beta.sigmoid(), plan)
        out = self.out_norm(out, z.unflatten(-1, (-1, self.sizes.value_dim)), self.tp).flatten(1)
        result, _ = self.out_proj(self._back(out, plan)[:, None])
        return result, None

    def _widths(self, sections: tuple[int, ...]) -> list[int]:
        """Widths of qkv, z, beta and alpha on this rank, with this rank's share of the heads."""
        share = [width // self.cp.size() for width in sections]
        return [sum(share[:3]), *share[3:]]

    def _convolved(self, qkv: Tensor, plan: Recurrence) -> tuple[Tensor, Tensor, Tensor]:
        """Computes query, key `[tokens, value heads, key dim]` of length 1, and value `[tokens, value heads, dim]`."""
        weight = self._own(self.conv1d().squeeze(1), self.local[:3])
        if self.fused:
            mixed, *_ = megatron_delta_net.causal_conv1d(
                x=qkv[None], weight=weight, activation="silu", **self._bounds(plan)
            )
            qkv = mixed[0]
        else:
            qkv = causal_convolution(qkv, weight, plan.positions)
        keys, values = self.local[0] // self.cp.size(), self.local[2] // self.cp.size()
        query, key, value = qkv.split((keys, keys, values), -1)
        query, key = (unit_length(x.unflatten(-1, (-1, self.sizes.key_dim))) for x in (query, key))
        shared = self.sizes.value_heads // self.sizes.key_heads
        query, key = (x.repeat_interleave(shared, dim=1) for x in (query, key))
        return query, key, value.unflatten(-1, (-1, self.sizes.value_dim))

    def _rule(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, plan: Recurrence) -> Tensor:
        if not self.fused:
            return gated_delta_rule(query, key, value, g, beta, plan)
        query, key = query.to(value.dtype), key.to(value.dtype)
        out, _ = megatron_delta_net.chunk_gated_delta_rule(
            query[None], key[None], value[None], g=g[None], beta=beta[None], **self._bounds(plan)
        )
        rows: Tensor = out[0]
        return rows

    @staticmethod
    def _bounds(plan: Recurrence) -> dict[str, Tensor]:
        """Bounds of sequences for the kernels; those on the host spare them a wait for the GPU."""
        return {"cu_seqlens": plan.cu_seqlens, "cu_seqlens_cpu": plan.host_cu_seqlens.tensor}

    def _own(self, parameter: Tensor, sections: tuple[int, ...] | None = None) -> Tensor:
        """Takes this cp rank's heads of a parameter that tp cuts: its share of each section of rows."""
        if self.cp.size() == 1:
            return parameter
        parts = parameter.split(sections) if sections is not None else (parameter,)
        return torch.cat([part.chunk(self.cp.size())[self.cp.rank()] for part in parts])

    def _in_order(self, rows: Tensor, plan: Recurrence) -> Tensor:
        """Brings `in_proj`'s output `[local tokens, columns]` to all tokens in order, with this cp rank's heads."""
        size = self.cp.size()
        if size > 1:
            parts = [part.unflatten(1, (size, -1)) for part in rows.split(self.local, -1)]
            rows = all_to_all(self.cp, torch.cat(parts, -1).transpose(0, 1).flatten(0, 1).contiguous())
        return rows if plan.gather is None else rows.index_select(0, plan.gather)

    def _back(self, out: Tensor, plan: Recurrence) -> Tensor:
        """Brings outputs `[tokens, value columns]` of this cp rank's heads to its tokens, with all heads."""
        if plan.select is not None:
            out = out.index_select(0, plan.select)
        size = self.cp.size()
        if size == 1:
            return out
        return all_to_all(self.cp, out.contiguous()).unflatten(0, (size, -1)).transpose(0, 1).flatten(1)
