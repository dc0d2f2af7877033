"""Models and layouts whose parameters Transformer Engine itself builds. Imports no package but megarl's tests."""

from __future__ import annotations

from typing import Any

from tests.latent_shapes import LATENT, SIGMOID_EXPERTS, YARN

SHAPE: dict[str, Any] = {  # 2 layers, hidden 64, 4 heads on 2 KV heads; a vocabulary that needs padding
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 343,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SPARSE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
DELTA_NET: dict[str, Any] = {  # the first layer is a gated delta net, the second has gated attention
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "full_attention_interval": 2, "head_dim": 16,
}  # fmt: skip
QUERIES_AND_KEYS = {name: value for name, value in LATENT.items() if value is not None}
MTP = {"num_nextn_predict_layers": 1, "trained_mtp": True}  # the mark of `families/mtp.py`
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 16},
    "llama_biased_tied": {"model_type": "llama", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "mixtral": {"model_type": "mixtral", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "deepseek_v3": {  # latent attention, a dense layer and a sparse one
        "model_type": "deepseek_v3", **SIGMOID_EXPERTS, **QUERIES_AND_KEYS, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "rope_parameters": YARN, "num_nextn_predict_layers": 0,
    },
    "deepseek_v3_plain_query": {  # queries without a latent vector, as in Moonlight; the layer of MTP is trained
        "model_type": "deepseek_v3", **SIGMOID_EXPERTS, **QUERIES_AND_KEYS, "q_lora_rank": None,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, **MTP,
    },
    "gemma3": {  # norms around blocks, a window in the first layer and none in the second
        "model_type": "gemma3_text", "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {  # biases of queries, keys and values with norms of heads; the layer of MTP is trained
        "model_type": "glm4_moe", "head_dim": 16, **SIGMOID_EXPERTS, "first_k_dense_replace": 1, "attention_bias": True,
        "use_qk_norm": True, **MTP,
    },
    "gpt_oss": {  # sinks, and biases of all projections, the router's and the experts' too
        "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    },
    "qwen3_next": {"model_type": "qwen3_next", **SPARSE, **DELTA_NET, "trained_mtp": True},
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA_NET, "trained_mtp": True},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **SPARSE, **DELTA_NET},
}  # fmt: skip
SPARSE_MODELS = (
    "mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v3_plain_query", "glm4_moe", "gpt_oss", "qwen3_next",
    "qwen3_5_moe",
)  # fmt: skip
RECOMPUTED = (
    "llama_biased_tied", "qwen3", "qwen3_moe", "deepseek_v3", "gemma3", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5",
)  # fmt: skip
TP2 = {"tp_size": 2, "sequence_parallel": True}
LAYOUTS: list[tuple[dict[str, Any], list[int]]] = [  # with the ranks that are built
    ({}, [0]),
    ({"tp_size": 2}, [0, 1]),
    (TP2, [0]),
    ({**TP2, "tp_size": 4}, [1]),  # more ranks than KV heads
    ({"pp_size": 2}, [0, 1]),
]
EXPERT_LAYOUTS: list[tuple[dict[str, Any], list[int]]] = [
    ({"dp_size": 2, "ep_size": 2}, [1]),
    ({**TP2, "ep_size": 2, "etp_size": 1}, [0, 1]),
    ({**TP2, "dp_size": 2, "ep_size": 2}, [3]),  # experts cut over tp as well
]
NAMES = (  # below transformer_engine.pytorch: functions whose arguments the stand-in takes by the recorded signature
    "Linear.__init__",
    "Linear.forward",
    "LayerNormLinear.__init__",
    "LayerNormLinear.forward",
    "GroupedLinear.__init__",
    "GroupedLinear.forward",
    "RMSNorm.__init__",
    "DotProductAttention.__init__",
    "DotProductAttention.forward",
    "ops.SwiGLU.__init__",
    "attention.rope.apply_rotary_pos_emb",
    "permutation.moe_permute",
    "permutation.moe_permute_with_probs",
    "permutation.moe_sort_chunks_by_index",
    "permutation.moe_sort_chunks_by_index_with_probs",
    "permutation.moe_unpermute",
    "router.fused_topk_with_score_function",
    "cpp_extensions.general_gemm",
    "cpu_offload.get_cpu_offload_context",
    "optimizers.FusedAdam.__init__",
    "distributed.activation_recompute_forward",
    "module.base.initialize_ub",
    "module.base.get_dummy_wgrad",
)
OFFERED = (  # what the stand-in has beside these
    "LayerNorm",
    "optimizers.FusedSGD",
    "permutation.moe_permute_and_pad_with_probs",
    "optimizers.multi_tensor_applier",
    "optimizers.multi_tensor_l2norm",
    "optimizers.multi_tensor_scale",
    "distributed.CudaRNGStatesTracker",
    "distributed.checkpoint",
    "Fp8Padding",
    "Fp8Unpadding",
    "fp8.FP8GlobalStateManager",
    "fp8.fp8_autocast",
    "fp8.fp8_model_init",
    "tensor.QuantizedTensor",
    "module.base.TransformerEngineBaseModule",
    "module.base.UserBufferQuantizationMode",
    "module.base.destroy_ub",
    "router.fused_compute_score_for_moe_aux_loss",
    "router.fused_moe_aux_loss",
)


def runs() -> list[tuple[str, dict[str, Any], int, str]]:
    """Every model, layout and rank, and `actor.recompute`, on which the modules depend."""
    return [
        (name, fitted(name, layout), rank, "none")
        for name in MODELS
        for layout, ranks in LAYOUTS + (EXPERT_LAYOUTS if name in SPARSE_MODELS else [])
        for rank in ranks
    ] + [(name, fitted(name, layout), 0, "selective") for name in RECOMPUTED for layout in ({}, TP2)]


def fitted(name: str, layout: dict[str, Any]) -> dict[str, Any]:
    """The layout as the model takes it: Megatron leaves experts with biases uncut."""
    return {**layout, "etp_size": 1} if name == "gpt_oss" and "tp_size" in layout else layout
