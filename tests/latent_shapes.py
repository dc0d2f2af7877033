"""Fields of tiny configs that DeepSeek-V3 and its relatives share in all tests."""

from typing import Any

SIGMOID_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid",
}  # fmt: skip
LATENT: dict[str, Any] = {  # no two sizes are equal
    "q_lora_rank": 40, "kv_lora_rank": 28, "qk_nope_head_dim": 14, "qk_rope_head_dim": 6, "v_head_dim": 10,
    "num_key_value_heads": 4, "head_dim": None, "topk_method": "noaux_tc",
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip
