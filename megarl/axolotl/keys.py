"""Maps each key of an axolotl YAML to megarl's knob, or to the reason why it is ignored or refused."""

from __future__ import annotations

from typing import Any

from megarl.foreign.reading import Tables

# Keys whose value a knob takes unchanged.
KNOBS = {
    "base_model": "actor.path",
    "seed": "seed",
    "output_dir": "run_root",
    "wandb_name": "experiment_name",
    "wandb_project": "logger.wandb_project",
    "use_wandb": "logger.wandb",
    "use_tensorboard": "logger.tensorboard",
    "learning_rate": "actor.optimizer.lr",
    "weight_decay": "actor.optimizer.weight_decay",
    "adam_beta1": "actor.optimizer.adam_beta1",
    "adam_beta2": "actor.optimizer.adam_beta2",
    "adam_epsilon": "actor.optimizer.adam_eps",
    "max_grad_norm": "actor.optimizer.clip_grad",
    "cosine_min_lr_ratio": "actor.optimizer.min_lr_ratio",
    "context_parallel_size": "parallel.cp_size",
    "sequence_parallel_degree": "parallel.cp_size",
    "tensor_parallel_size": "parallel.tp_size",
    "save_total_limit": "saver.keep",
    "shuffle_merged_datasets": "train_dataset.shuffle",
    "dataloader_num_workers": "train_dataset.num_workers",
    "dataloader_drop_last": "train_dataset.drop_last",
    "trl.num_generations": "gconfig.n_samples",
    "trl.top_p": "gconfig.top_p",
    "trl.top_k": "gconfig.top_k",
    "trl.reward_funcs": "rewards.functions",
    "trl.rollout_func": "rollout.rollout_func",
    "vllm.port": "server.port",
    "vllm.tensor_parallel_size": "server.tp_size",
    "vllm.data_parallel_size": "server.n_servers",
    "vllm.gpu_memory_utilization": "sglang.mem_fraction_static",
    "vllm.max_model_len": "sglang.context_length",
    "vllm.enforce_eager": "sglang.disable_cuda_graph",
    "vllm.reasoning_parser": "sglang.reasoning_parser",
    "trl.vllm_server_timeout": "server.ready_timeout_s",
}
# Keys of which some values set a knob, and None if nothing has to change. Other values are refused.
CHOICES: dict[str, dict[Any, tuple[str, Any] | None]] = {
    "gradient_checkpointing": {True: ("actor.recompute", "full"), False: ("actor.recompute", "none")},
    "optimizer": dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")),
    "lr_scheduler": {
        "cosine": ("actor.optimizer.lr_decay_style", "cosine"),
        "linear": ("actor.optimizer.lr_decay_style", "linear"),
        "constant": ("actor.optimizer.lr_decay_style", "constant"),
        "constant_with_warmup": ("actor.optimizer.lr_decay_style", "constant"),
        "inverse_sqrt": ("actor.optimizer.lr_decay_style", "inverse-square-root"),
    },
    "vllm.enable_prefix_caching": {
        True: ("sglang.disable_radix_cache", False),
        False: ("sglang.disable_radix_cache", True),
    },
    "vllm.dtype": {
        "auto": None,
        "half": ("server.dtype", "float16"),
        **{name: ("server.dtype", name) for name in ("float16", "bfloat16", "float32")},
    },
    "vllm.host": {
        "0.0.0.0": ("server.host", "127.0.0.1"),
        "127.0.0.1": ("server.host", "127.0.0.1"),
        "localhost": None,
    },
    "trl.vllm_server_host": dict.fromkeys(("0.0.0.0", "127.0.0.1", "localhost")),
    "trl.vllm_mode": {"server": None},
    "trl.num_iterations": {1: None},
    "trl.scale_rewards": {True: None},
    "trl.importance_sampling_level": {"token": None},
    "trl.multi_objective_aggregation": {"sum_then_normalize": None},
    "save_strategy": {"steps": None, "no": ("saver.every_steps", 0), False: ("saver.every_steps", 0)},
    "eval_strategy": {"steps": None, "no": ("evaluator.every_steps", 0), False: ("evaluator.every_steps", 0)},
}
# By the value of `rl`: the method, the algorithm, and for each of its keys the knob and axolotl's default.
ALGORITHMS: dict[str, tuple[str, str, dict[str, tuple[str, Any]]]] = {
    "dpo": (
        "preference", "dpo",
        {"rl_beta": ("algorithm.beta", 0.1), "dpo_label_smoothing": ("algorithm.label_smoothing", 0.0)},
    ),
    "ipo": ("preference", "ipo", {"rl_beta": ("algorithm.beta", 0.1)}),
    "kto": (
        "preference", "kto",
        {
            "rl_beta": ("algorithm.beta", 0.1),
            "kto_desirable_weight": ("algorithm.desirable_weight", 1.0),
            "kto_undesirable_weight": ("algorithm.undesirable_weight", 1.0),
        },
    ),
    "orpo": ("preference", "orpo", {"orpo_alpha": ("algorithm.alpha", 0.1)}),
    "simpo": (
        "preference", "simpo",
        {
            "rl_beta": ("algorithm.beta", 0.1),
            "cpo_alpha": ("algorithm.cpo_alpha", 1.0),
            "simpo_gamma": ("algorithm.gamma", 0.5),
        },
    ),
    "grpo": ("rl", "grpo", {"trl.beta": ("algorithm.kl_coef", 0.0), "trl.epsilon": ("algorithm.eps_clip", 0.2)}),
    "gdpo": ("rl", "gdpo", {"trl.beta": ("algorithm.kl_coef", 0.0), "trl.epsilon": ("algorithm.eps_clip", 0.2)}),
}  # fmt: skip
# Keys without effect in megarl, by reason.
_REASONS = {
    "always packed": ("sample_packing", "eval_sample_packing", "pad_to_sequence_len", "group_by_length"),
    "the engine has its own attention over packed sequences": (
        "flash_attention", "sdp_attention", "xformers_attention", "eager_attention", "attn_implementation",
    ),
    "keys and values are gathered over context-parallel ranks": ("ring_attn_func", "heads_k_stride"),
    "read from the checkpoint": ("model_type", "tokenizer_type", "is_llama_derived_model", "is_qwen_derived_model"),
    "prepared once, cached by content": ("dataset_prepared_path", "dataset_processes", "dataset_num_proc"),
    "the run starts SGLang servers itself": ("trl.use_vllm", "trl.vllm_server_port"),
    "evaluations keep every sample": ("trl.log_completions", "trl.num_completions_to_print"),
    "Megatron's recompute has one form": ("gradient_checkpointing_kwargs",),
    "a format reads its own columns": ("remove_unused_columns",),
    "the loss is always fused with the head": ("trl.use_liger_loss",),
    "affects speed only": ("precompute_ref_log_probs",),
    "every step is logged": ("logging_steps",),
    "checkpoints are safetensors": ("save_safetensors",),
    "unknown keys are refused": ("strict",),
}  # fmt: skip
NEEDLESS = {key: reason for reason, keys in _REASONS.items() for key in keys}
# Reasons why a key, or a value of it, is refused.
WHY_NOT = {
    "deepspeed": "Megatron shards the model; use parallel.* knobs",
    "fsdp": "Megatron shards the model; use parallel.* knobs",
    "fsdp_config": "Megatron shards the model; use parallel.* knobs",
    "max_prompt_len": "prompts are never cut; rows over sequence_len are skipped",
    "trust_remote_code": "a model's own code is never run",
    "trl.scale_rewards": "advantages are left unscaled by rl: grpo with one clip range alone",
    "trl.num_iterations": "each sampled batch is trained on once",
}
# LORA: the key of each knob of actor.lora. ADAPTER_KEYS: further keys of adapters, besides those that begin with lora_,
# peft or adapter.
LORA = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target_modules",
    "rslora": "peft_use_rslora",
    "path": "lora_model_dir",
}
ADAPTER_KEYS = (
    "rl_adapter_ref_model", "qlora_sharded_model_loading", "load_in_8bit", "load_in_4bit", "relora", "relora_steps",
    "merge_lora", "loraplus_lr_ratio", "loraplus_lr_embedding", "gptq",
)  # fmt: skip
NO_ADAPTERS = "there is no adapter: lora, and all weights are trained; add it, or leave these keys out"
UNKNOWN_ADAPTERS = "has no counterpart in actor.lora; leave it out"
# Keys of a data set that become `options` of its source.
DATASET_OPTIONS = ("field_messages", "field_chosen", "field_rejected", "message_property_mappings", "roles")
MESSAGE_FIELDS = {"message_field_role": "role", "message_field_content": "content"}  # keys of that mapping
# Keys that `read.py` converts itself and that take text.
TEXTS = (
    "trl.loss_type", "trl.multi_objective_aggregation", "trl.importance_sampling_level", "chat_template",
    "chat_template_jinja",
)  # fmt: skip
# `algorithm.aggregate` by `trl.loss_type`.
LOSS_TYPES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", None: "token"}
# Keys without a counterpart, which ask for nothing where they are false.
OFF = frozenset((
    "activation_offloading", "auto_resume_from_checkpoints", "bf16_full_eval", "curriculum_sampling",
    "cut_cross_entropy", "debug", "do_bench_eval", "do_causal_lm_eval", "dpo_padding_free",
    "dpo_use_logits_to_keep", "dpo_use_weighting", "fix_untrained_tokens", "flash_attn_cross_entropy",
    "flash_attn_fuse_mlp", "flash_attn_fuse_qkv", "flash_attn_rms_norm", "flash_optimum", "flex_attention",
    "fp16", "fp8", "fp8_enable_fsdp_float8_all_gather", "hub_always_push", "include_tkps",
    "include_tokens_per_second", "is_falcon_derived_model", "is_mistral_derived_model", "layer_offloading",
    "liger_cross_entropy", "liger_fused_linear_cross_entropy", "liger_glu_activation", "liger_layer_norm",
    "liger_rms_norm", "liger_rope", "load_best_model_at_end", "low_cpu_mem_usage", "push_dataset_to_hub",
    "resize_token_embeddings_to_32x", "s2_attention", "save_only_model", "skip_prepare_dataset", "streaming",
    "tf32", "tokenizer_legacy", "tokenizer_use_mistral_common", "torch_compile", "train_on_inputs",
    "trl.async_prefetch", "trl.mask_truncated_completions", "trl.streaming_partial_batch", "trl.sync_ref_model",
    "trl.use_transformers_paged", "trl.vllm_lora_sync", "unsloth_cross_entropy_loss", "unsloth_rms_norm",
    "unsloth_rope", "use_comet", "use_mlflow", "use_otel_metrics", "use_ray", "use_trackio",
    "vllm.enable_reasoning",
))  # fmt: skip
TABLES = Tables(KNOBS, CHOICES, NEEDLESS, WHY_NOT, ("datasets", "sequence_len"), OFF)
