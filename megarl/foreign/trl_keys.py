"""Maps each key of a TRL YAML to megarl's knob, or to the reason why it is ignored or refused.

Keys and defaults: trl/trainer/*_config.py and trl/scripts of https://github.com/huggingface/trl.
"""

from __future__ import annotations

from typing import Any

from megarl.foreign.reading import Tables

KNOBS = {
    "model_name_or_path": "actor.path",
    "seed": "seed",
    "output_dir": "run_root",
    "run_name": "experiment_name",
    "weight_decay": "actor.optimizer.weight_decay",
    "adam_beta1": "actor.optimizer.adam_beta1",
    "adam_beta2": "actor.optimizer.adam_beta2",
    "adam_epsilon": "actor.optimizer.adam_eps",
    "max_grad_norm": "actor.optimizer.clip_grad",
    "dataloader_num_workers": "train_dataset.num_workers",
    "dataloader_drop_last": "train_dataset.drop_last",
    "shuffle_dataset": "train_dataset.shuffle",
    "save_total_limit": "saver.keep",
    "top_p": "gconfig.top_p",
    "reward_funcs": "rewards.functions",
    "vllm_gpu_memory_utilization": "sglang.mem_fraction_static",
    "vllm_max_model_length": "sglang.context_length",
    "vllm_tensor_parallel_size": "server.tp_size",
    "vllm_server_timeout": "server.ready_timeout_s",
    "cast_lm_head_to_fp32": "actor.float32_head",
}
CHOICES: dict[str, dict[Any, tuple[str, Any] | None]] = {
    "gradient_checkpointing": {True: ("actor.recompute", "full"), False: ("actor.recompute", "none")},
    "optim": dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf")),
    "num_iterations": {1: None},
    "bnb_4bit_quant_type": {"nf4": None},
    "importance_sampling_level": {"token": None},
    "multi_objective_aggregation": {"sum_then_normalize": None},
    "vllm_mode": {"server": None, "colocate": ("server.colocate", True)},
    "top_k": {0: ("gconfig.top_k", -1)},
    "repetition_penalty": {1.0: None},
    "save_strategy": {"steps": None, "no": ("saver.every_steps", 0), False: ("saver.every_steps", 0)},
    "eval_strategy": {"steps": None, "no": ("evaluator.every_steps", 0), False: ("evaluator.every_steps", 0)},
    "report_to": {
        "none": ("logger.tensorboard", False),
        "tensorboard": ("logger.tensorboard", True),
        "wandb": ("logger.wandb", True),
    },
}
_REASONS = {
    "every step is logged": ("logging_steps", "logging_strategy", "logging_first_step"),
    "evaluations keep every sample": ("log_completions", "num_completions_to_print"),
    "models are built without dropout": ("disable_dropout",),
    "columns reach the rewards that name them": ("remove_unused_columns",),
    "evaluations take every row": ("per_device_eval_batch_size",),
    "always packed": ("packing", "padding_free", "group_by_length", "eval_packing"),
    "Megatron's recompute has one form": ("gradient_checkpointing_kwargs",),
    "the engine has its own attention over packed sequences": ("attn_implementation",),
    "the loss is always fused with the head": ("use_liger_kernel", "use_liger_loss"),
    "the run starts SGLang servers itself, or takes those of python -m megarl.serve": (
        "use_vllm", "vllm_server_host", "vllm_server_port", "vllm_group_port", "vllm_server_base_url",
    ),
    "affects speed only": (
        "precompute_ref_log_probs", "ds3_gather_for_generation", "vllm_enable_sleep_mode", "dataset_num_proc", "tf32",
    ),
}  # fmt: skip
NEEDLESS = {key: reason for reason, keys in _REASONS.items() for key in keys}
WHY_NOT = {
    "deepspeed": "Megatron shards the model; use parallel.* knobs",
    "fsdp": "Megatron shards the model; use parallel.* knobs",
    "trust_remote_code": "a model's own code is never run",
    "num_iterations": "each sampled batch is trained on once",
    "max_prompt_length": "prompts are never cut; give train_dataset.max_length, and longer ones are skipped",
    "sync_ref_model": "the reference stays the start policy",
    "fp16": "parameters are float32 or bfloat16",
    "reward_model_name_or_path": "rewards are functions; call the model from one",
}
LORA = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target_modules",
    "rslora": "use_rslora",
}
LORA_DEFAULTS = {"rank": 16, "alpha": 32, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}  # TRL's, and PEFT's targets
# Keys of the weight by trainer/vLLM probability. The cap is the older name of the upper bound, and wins.
SAMPLING = {
    "correction": "vllm_importance_sampling_correction",
    "mode": "vllm_importance_sampling_mode",
    "low": "vllm_importance_sampling_clip_min",
    "high": "vllm_importance_sampling_clip_max",
    "cap": "vllm_importance_sampling_cap",
}
CORRECTIONS = {  # by mode: algorithm.correction and algorithm.correction_level
    "token_truncate": ("truncate", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("truncate", "sequence"),
    "sequence_mask": ("mask", "sequence"),
}
OTHERS = (
    "use_peft", *LORA.values(), *SAMPLING.values(),
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "learning_rate", "beta", "epsilon",
    "epsilon_high", "loss_type", "scale_rewards", "reward_weights", "num_generations", "max_completion_length",
    "max_length", "temperature", "per_device_train_batch_size",
    "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation", "num_train_epochs", "max_steps",
    "warmup_steps", "warmup_ratio", "lr_scheduler_type", "save_steps", "eval_steps", "bf16", "dtype", "torch_dtype",
    "label_smoothing", "center_rewards_coefficient",
)  # fmt: skip
# Keys without a counterpart, which ask for nothing where they are false.
OFF = frozenset((
    "activation_offloading", "assistant_only_loss", "auto_find_batch_size", "average_tokens_across_devices",
    "batch_eval_metrics", "bf16_full_eval", "completion_only_loss", "dataloader_persistent_workers",
    "dataset_streaming", "do_eval", "do_predict", "do_train", "eval_on_start", "force_use_ref_model",
    "fp16_full_eval", "full_determinism", "generate_during_eval", "gradient_checkpointing_use_reentrant",
    "hub_always_push", "hub_private_repo", "ignore_bias_buffers", "ignore_data_skip",
    "include_inputs_for_metrics", "include_num_input_tokens_seen", "include_tokens_per_second", "jit_mode_eval",
    "load_best_model_at_end", "load_in_4bit", "load_in_8bit", "log_unique_prompts",
    "mask_truncated_completions", "no_cuda", "normalize_advantages", "overwrite_output_dir",
    "prediction_loss_only", "push_to_hub", "reference_free", "restore_callback_states_from_checkpoint",
    "save_on_each_node", "save_only_model", "token_level_kl", "torch_compile", "use_bnb_nested_quant",
    "use_cpu", "use_dora", "use_logits_to_keep", "use_mps_device", "use_rslora", "use_transformers_paged",
    "use_weighting", "wandb_log_unique_prompts",
))  # fmt: skip
TABLES = Tables(KNOBS, CHOICES, NEEDLESS, WHY_NOT, OTHERS, OFF)
# By TRL's command: megarl's method and algorithm, the default learning rate, and knobs by key with TRL's default.
COMMANDS: dict[str, tuple[str, str, float, dict[str, tuple[str, float]]]] = {
    "grpo": ("rl", "grpo", 1e-6, {"beta": ("algorithm.kl_coef", 0.0)}),
    "rloo": ("rl", "rloo", 1e-6, {"beta": ("algorithm.kl_coef", 0.05)}),
    "dpo": (
        "preference", "dpo", 1e-6,
        {"beta": ("algorithm.beta", 0.1), "label_smoothing": ("algorithm.label_smoothing", 0.0)},
    ),
    "reward": (
        "preference", "reward_model", 1e-4, {"center_rewards_coefficient": ("algorithm.center_coef", 0.0)},
    ),
    "sft": ("sft", "", 2e-5, {}),
}  # fmt: skip
# How rows of TRL's data sets are read, by method.
ROWS = {"rl": "messages", "preference": "chat_template.argilla_chat", "sft": "messages"}
AGGREGATES = {"grpo": "sequence", "bnpo": "token", "dapo": "token"}
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
}  # fmt: skip
