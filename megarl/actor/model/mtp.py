"""Layers of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): a module beside the model.

At depth d, the hidden state of token i and the embedding of token i + d are normed, joined and projected. One layer and
a norm follow, then the model's own head predicts token i + d + 1. Depth 1 reads the model's hidden states after its
final norm, and each further depth the hidden states of the depth before, as Megatron and SGLang have it.

    h'_i = W [norm(e_(i+d)); norm(h_i)]        eq. 21
    h_i  = norm(layer(h'))_i                   eq. 22, and the norm before the head

Megatron's own module rolls tokens inside the model, and its parameters share the model's buffers and gradient norm.
Here tokens are shifted on the host, before they are cut over ranks (`FutureTokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    checkpoint,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.actor.model.backends import LayerBackend
from megarl.families.blocks import MtpLayer
from megarl.parallel.groups import Groups

NORM_GROUP = "mtp"  # Megatron's name of parameters with a gradient norm of their own (optimizer.py:150)


class MtpDepth(MegatronModule):
    """Layer of one depth. Reads and returns hidden states `[tokens, 1, hidden]`, cut by sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, depth: int, shape: MtpLayer, backend: LayerBackend, groups: Groups
    ) -> None:
        super().__init__(config=config)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm, self.hnorm, self.final_layernorm = (backend.norm(**norm) for _ in range(3))
        self.eh_proj = backend.column_linear(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=groups.tp,
        )
        self.layer = build_module(
            backend.layer_spec(shape.layer),
            config=config,
            layer_number=depth,
            is_mtp_layer=True,
            pg_collection=groups.collection,
        )
        self.tp = groups.tp

    def forward(self, hidden: Tensor, embedded: Tensor, angles: Tensor | None, packed: PackedSeqParams) -> Tensor:
        """Computes the hidden states before the head from the last depth's and from later tokens' embeddings."""
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        projected = gather_from_tensor_model_parallel_region(self.eh_proj(joined)[0], group=self.tp)
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected, group=self.tp)
        out, _ = self.layer(projected, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed)
        normed: Tensor = self.final_layernorm(out)
        return normed


class MtpLayers(MegatronModule):
    """Layers of all depths, on ranks with the model's last stage."""

    def __init__(
        self, config: TransformerConfig, shapes: Sequence[MtpLayer], backend: LayerBackend, groups: Groups
    ) -> None:
        super().__init__(config=config)
        depths = [MtpDepth(config, i + 1, shape, backend, groups) for i, shape in enumerate(shapes)]
        self.layers = torch.nn.ModuleList(depths)
        for param in self.parameters():
            setattr(param, "grad_norm_group", NORM_GROUP)  # noqa: B010 (Megatron's optimizer reads it)

    def forward(
        self, hidden: Tensor, embedded: Sequence[Tensor], angles: Tensor | None, packed: PackedSeqParams
    ) -> list[Tensor]:
        """Computes each depth's hidden states. With actor.recompute=full, only the inputs of depths are kept."""
        recomputes = self.config.recompute_granularity == "full" and torch.is_grad_enabled()
        outputs = []
        for layer, later in zip(self.layers, embedded, strict=True):
            if recomputes:
                hidden = checkpoint(_recomputed(layer, packed), False, hidden.requires_grad_(), later, angles)
            else:
                hidden = layer(hidden, later, angles, packed)
            outputs.append(hidden)
        return outputs


def _recomputed(layer: torch.nn.Module, packed: PackedSeqParams) -> Any:
    """The layer as a function of tensors alone, as Megatron's `checkpoint` takes it."""
    return lambda hidden, later, angles: layer(hidden, later, angles, packed)


def embed(weight: Tensor, ids: Tensor, groups: Groups) -> Tensor:
    """Looks up embeddings `[tokens, 1, hidden]` of `ids [local tokens]`, without gradient.

    `weight` is this rank's rows. Under sequence parallelism the result is the rank's part of the tokens.
    """
    with torch.no_grad():
        row = ids - groups.tp_rank * weight.shape[0]
        inside = (row >= 0) & (row < weight.shape[0])
        embedded = F.embedding(row * inside, weight).masked_fill(~inside[:, None], 0.0)
        if groups.tp_size > 1:
            dist.all_reduce(embedded, group=groups.tp)
        if groups.layout.sequence_parallel:
            embedded = embedded.chunk(groups.tp_size)[groups.tp_rank]
        return embedded[:, None]
