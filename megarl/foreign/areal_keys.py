"""Maps each key of an AReaL YAML to megarl's knob, or to the reason why it is ignored or refused.

Keys and defaults: the module cli_args and the examples of https://github.com/inclusionAI/AReaL.
"""

from __future__ import annotations

from typing import Any

from megarl.foreign.reading import Tables

KNOBS = {
    "experiment_name": "experiment_name",
    "seed": "seed",
    "total_train_steps": "total_train_steps",
    "actor.path": "actor.path",
    "actor.mb_spec.max_tokens_per_mb": "actor.max_tokens_per_mb",
    "actor.temperature": "actor.temperature",
    "actor.optimizer.lr": "actor.optimizer.lr",
    "actor.optimizer.weight_decay": "actor.optimizer.weight_decay",
    "actor.optimizer.beta1": "actor.optimizer.adam_beta1",
    "actor.optimizer.beta2": "actor.optimizer.adam_beta2",
    "actor.optimizer.eps": "actor.optimizer.adam_eps",
    "actor.optimizer.gradient_clipping": "actor.optimizer.clip_grad",
    "actor.optimizer.min_lr_ratio": "actor.optimizer.min_lr_ratio",
    "actor.eps_clip": "algorithm.eps_clip",
    "actor.ppo_n_minibatches": "algorithm.n_minibatches",
    "rollout.max_head_offpolicyness": "rollout.max_head_offpolicyness",
    "cluster.n_gpus_per_node": "cluster.gpus_per_node",
    "cluster.fileroot": "run_root",
    "rollout.setup_timeout": "server.ready_timeout_s",
    "rollout.request_timeout": "rollout.request_timeout_s",
    "rollout.request_retries": "rollout.max_retries",
    "stats_logger.wandb.project": "logger.wandb_project",
    **{f"gconfig.{name}": f"gconfig.{name}" for name in (
        "n_samples", "min_new_tokens", "max_new_tokens", "greedy", "temperature", "top_p", "top_k", "stop",
        "stop_token_ids",
    )},
    **{f"train_dataset.{name}": f"train_dataset.{name}" for name in (
        "path", "batch_size", "shuffle", "num_workers", "drop_last", "max_length",
    )},
    **{f"valid_dataset.{name}": f"valid_dataset.{name}" for name in (
        "path", "batch_size", "shuffle", "num_workers", "drop_last", "max_length",
    )},
    "saver.freq_steps": "saver.every_steps",
    "evaluator.freq_steps": "evaluator.every_steps",
    **{f"sglang.{name}": f"sglang.{name}" for name in (
        "context_length", "mem_fraction_static", "max_running_requests", "attention_backend", "disable_cuda_graph",
        "disable_radix_cache", "chunked_prefill_size", "schedule_policy", "max_prefill_tokens",
    )},
}  # fmt: skip
# AReaL's defaults of keys without a counterpart, which ask for nothing. Another value is refused.
_DEFAULTS: dict[str, Any] = {
    "enable_offload": False, "dynamic_bs": False,
    **{f"{part}.{name}": default for part in ("actor", "ref") for name, default in {
        "attn_impl": "flash_attention_2", "is_critic": False, "mb_spec.n_mbs": 1, "mb_spec.granularity": 1,
        "mb_spec.n_mbs_divisor": 1, "pad_to_maximum": False, "grad_reduce_dtype": "float32", "use_lora": False,
        "lora_rank": 32, "lora_alpha": 16, "peft_type": "lora", "fsdp.offload_params": False,
        "megatron.wrap_with_ddp": True, "megatron.use_torch_fsdp2": False,
        "megatron.use_custom_fsdp": False, "megatron.virtual_pipeline_parallel_size": 1,
        "megatron.async_save": False, "megatron.use_deterministic_algorithms": False,
        "megatron.ddp.grad_reduce_in_fp32": True, "megatron.ddp.use_distributed_optimizer": True,
        "megatron.ddp.check_for_nan_in_grad": False, "megatron.ddp.fp8_param_gather": False,
    }.items()},
    "actor.optimizer.offload": False, "actor.optimizer.initial_loss_scale": 2**32,
    "actor.optimizer.min_loss_scale": 1.0, "actor.optimizer.loss_scale_window": 5, "actor.optimizer.hysteresis": 2,
    "actor.overlong_reward_penalty": False, "actor.mask_no_eos_with_zero": False, "actor.discount": 1.0,
    "actor.gae_lambda": 1.0, "actor.importance_sampling_level": "token", "actor.dynamic_sampling": False,
    "actor.log_agent_stats": False, "actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group",
    "actor.reward_norm.mean_leave1out": False, "actor.kl_estimator": "k1",
    "rollout.check_trajectory_format": False, "rollout.pause_grace_period": 0.0,
    "gconfig.max_tokens": 65536, "gconfig.frequency_penalty": 0.0,
    **{f"sglang.{name}": default for name, default in {
        "disable_cuda_graph_padding": False, "enable_nccl_nvls": False, "disable_outlines_disk_cache": False,
        "disable_custom_all_reduce": False, "disable_overlap_schedule": False, "enable_mixed_chunk": False,
        "enable_dp_attention": False, "enable_ep_moe": False, "enable_torch_compile": False,
        "torch_compile_max_bs": 32, "torchao_config": "", "enable_nan_detection": False, "enable_p2p_check": False,
        "triton_attention_reduce_in_fp32": False, "triton_attention_num_kv_splits": 8,
        "num_continuous_decode_steps": 1, "enable_memory_saver": False, "allow_auto_truncate": False,
        "enable_multimodal": False, "schedule_conservativeness": 1.0, "cpu_offload_gb": 0, "kv_cache_dtype": "auto",
        "dp_size": 1, "ep_size": 1, "max_loaded_loras": 1, "max_loras_per_batch": 1, "lora_backend": "triton",
        "enable_multithread_load": False, "enable_fast_load": False,
    }.items()},
    "stats_logger.swanlab.mode": "disabled", "recover.mode": "disabled", "perf_tracer.enabled": False,
    "perf_tracer.session_tracer.enabled": False, "train_dataset.type": "rl", "valid_dataset.type": "rl",
}  # fmt: skip
CHOICES: dict[str, dict[Any, tuple[str, Any] | None]] = {
    "actor.gradient_checkpointing": {True: ("actor.recompute", "full"), False: ("actor.recompute", "none")},
    "actor.init_from_scratch": {True: ("actor.init", "random"), False: None},
    "actor.dtype": {"bfloat16": ("actor.dtype", "bfloat16"), "float32": ("actor.dtype", "float32")},
    "actor.optimizer.type": {"adam": None, "adamw": None},
    "actor.optimizer.lr_scheduler_type": {
        name: ("actor.optimizer.lr_decay_style", name) for name in ("constant", "linear", "cosine")
    },
    "actor.group_adv_norm": {True: None},
    "actor.reward_scaling": {1.0: None},
    "actor.reward_bias": {0.0: None},
    "actor.recompute_logprob": {True: None},
    "sglang.dtype": {name: ("server.dtype", name) for name in ("bfloat16", "float16", "float32", "auto")},
    "ref.dtype": {"bfloat16": None, "float32": None},
    "server_only": {False: None},
    **{key: {default: None} for key, default in _DEFAULTS.items()},
}
_REASONS = {
    "one name for a run": tuple(
        f"{part}.{name}"
        for part in (
            "rollout", "actor", "ref", "saver", "checkpointer", "evaluator", "stats_logger", "recover", "perf_tracer",
        )
        for name in ("experiment_name", "trial_name", "fileroot")
    ),
    "the run's folder carries the time": ("trial_name",),
    "the tokenizer is the checkpoint's": ("tokenizer_path", "rollout.tokenizer_path"),
    "one backend, Megatron": ("actor.backend", "ref.backend"),
    "models are built without dropout": ("actor.disable_dropout", "ref.disable_dropout"),
    "reshard.transport chooses the way of weights": ("actor.weight_update_mode", "ref.weight_update_mode"),
    "gconfig.max_new_tokens bounds completions": ("actor.max_new_tokens",),
    "the launcher places processes": (
        "actor.scheduling_spec", "ref.scheduling_spec", "rollout.scheduling_spec", "ref.scheduling_strategy.type",
        "ref.scheduling_strategy.target", "scheduler.type", "scheduler.endpoint", "scheduler.deploy_mode",
        *(f"launcher.{name}" for name in (
            "inference_server_cpus_per_gpu", "inference_server_mem_per_gpu", "trainer_cpus_per_gpu",
            "trainer_mem_per_gpu", "inference_server_env_vars", "trainer_env_vars", "slurm.srun_additional_args",
            "slurm.container_type", "slurm.mount", "slurm.trainer_image", "slurm.inference_server_image",
        )),
    ),
    "the servers are SGLang's": tuple(f"vllm.{name}" for name in (
        "model", "seed", "skip_tokenizer_init", "enforce_eager", "dtype", "distributed_executor_backend",
        "max_num_seqs", "block_size", "swap_space", "cpu_offload_gb", "disable_sliding_window", "max_model_len",
        "enable_chunked_prefill", "enable_prefix_caching", "gpu_memory_utilization", "worker_extension_cls",
        "enable_sleep_mode", "uvicorn_log_level",
    )),
    "samples are kept beside the run's metrics": ("rollout.dump_to_file",),
    "servers' logs and metrics are the run's": tuple(f"sglang.{name}" for name in (
        "log_level", "log_level_http", "log_requests", "log_requests_level", "show_time_cost", "enable_metrics",
        "decode_log_interval",
    )),
    "one name and one place for a run's figures": (
        *(f"stats_logger.wandb.{name}" for name in ("entity", "name", "job_type", "group", "notes", "id_suffix")),
        "perf_tracer.save_interval", "perf_tracer.session_tracer.flush_threshold",
    ),
    "the client chooses servers by their load": ("rollout.schedule_policy",),
    "the reference is the start policy": ("ref.path", "ref.init_from_scratch", "ref.mb_spec.max_tokens_per_mb"),
    "the group is gconfig.n_samples": ("actor.group_size", "actor.reward_norm.group_size"),
    "a batch's prompts bound it": (
        "rollout.max_concurrent_rollouts", "rollout.queue_size", "rollout.consumer_batch_size",
        "rollout.enable_rollout_tracing",
    ),
    "the servers belong to the run": ("sglang.model_path", "sglang.random_seed", "sglang.skip_tokenizer_init"),
    "launchers meet through the run's folder": (
        "cluster.name_resolve.type", "cluster.name_resolve.nfs_record_root", "cluster.cluster_name",
        "cluster.name_resolve.etcd3_addr", "cluster.name_resolve.ray_actor_name",
    ),
    "memory is pinned where it is copied": ("train_dataset.pin_memory", "valid_dataset.pin_memory"),
    "checkpoints are counted in steps": (
        "saver.freq_epochs", "saver.freq_secs", "checkpointer.freq_epochs", "checkpointer.freq_secs",
        "checkpointer.freq_steps", "evaluator.freq_epochs", "evaluator.freq_secs",
        "recover.freq_epochs", "recover.freq_secs", "recover.freq_steps", "recover.retries",
    ),
}  # fmt: skip
WHY_NOT = {
    "actor.reward_clip": "rewards are not clipped; clip them in the reward function",
    "actor.adv_norm.mean_level": "advantages are normalised over the group alone; leave adv_norm out",
    "actor.adv_norm.std_level": "advantages are normalised over the group alone; leave adv_norm out",
    "actor.eps_clip_higher": "two clip ranges are algorithm=dapo; give algorithm.clip_low and clip_high after the file",
    "actor.reward_norm.mean_level": "GRPO normalises over the group",
    "actor.reward_norm.std_level": "GRPO normalises over the group; without a deviation it is algorithm=dr_grpo",
    "actor.kl_estimator": "give algorithm.kl_estimator after the file",
    "recover.mode": "go on with resume=RUN_FOLDER",
    "stats_logger.tensorboard.path": "give logger.tensorboard=true; its files stand in the run's folder",
    "actor.group_adv_norm": "GRPO normalises over the group; use algorithm=reinforce for none",
    "actor.reward_scaling": "scale rewards in the reward function",
    "actor.reward_bias": "shift rewards in the reward function",
    "actor.recompute_logprob": "the trainer's log-probs are always computed",
    "total_train_epochs": "megarl counts steps; give total_train_steps=N after the file too",
}
LORA = {"rank": "actor.lora_rank", "alpha": "actor.lora_alpha", "targets": "actor.target_modules"}
OTHERS = (
    "allocation_mode", "async_training", "total_train_epochs", "cluster.n_nodes", "actor.use_decoupled_loss",
    "actor.kl_ctl", "actor.behav_imp_weight_cap", "actor.optimizer.warmup_steps_proportion", "stats_logger.wandb.mode",
)  # fmt: skip
NEEDLESS = {key: reason for reason, keys in _REASONS.items() for key in keys}
TABLES = Tables(KNOBS, CHOICES, NEEDLESS, WHY_NOT, OTHERS, defaults=_DEFAULTS)
