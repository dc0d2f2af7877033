"""Maps HF fields of mixtures of experts to Megatron's."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from megarl.families import moe_shape


def moe_fields(config: PretrainedConfig, *, grouped: bool) -> dict[str, Any]:
    """Builds the fields of Megatron's `TransformerConfig` for the model's experts; empty for a dense model.

    A token's weights are the softmax over all experts, cut to the largest `topk`. Megatron calls this pre-softmax. In
    models with normalised weights these `topk` sum to 1, which equals the softmax over them alone. Routing drops no
    token and adds no load-balancing loss, so it does not depend on the other tokens of a microbatch. `grouped` runs a
    rank's experts in one kernel of Transformer Engine.
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
