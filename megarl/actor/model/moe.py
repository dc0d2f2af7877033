"""Mixtures of experts: how the HF fields map to Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from megarl.families import moe_shape


def moe_fields(config: PretrainedConfig, *, grouped: bool) -> dict[str, Any]:
    """The fields of Megatron's `TransformerConfig` for the model's experts; none for a dense model.

    A token's weights are the softmax over all experts, of which the largest `topk` are kept: as they are, or made to
    sum to 1, which is the softmax over these alone. Megatron calls the first pre-softmax. Routing drops no token and
    adds no load-balancing loss, so that it does not depend on what else is in the microbatch. `grouped` multiplies
    the experts of a rank in one kernel, which Transformer Engine has.
    """
    moe = moe_shape(config)
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.experts,
        "moe_layer_freq": [int(sparse) for sparse in moe.layers],
        "moe_ffn_hidden_size": moe.width,
        "moe_router_topk": moe.topk,
        "moe_router_pre_softmax": not moe.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": grouped,
    }


def mark_experts(module: torch.nn.Module) -> None:
    """Marks the parameters of experts, whose gradients are summed over the replicas of the experts.

    Megatron marks them under expert parallelism only (tensor_parallel/layers.py:886), and takes them for dense ones,
    with the replicas of these, where etp alone lays experts out in another way.
    """
    for name, param in module.named_parameters():
        if ".mlp.experts." in name:
            param.allreduce = False  # type: ignore[attr-defined]
