"""Maps each key of a verl command line to megarl's knob, or to the reason why it is ignored or refused.

Keys: verl/trainer/config/ppo_trainer.yaml and ppo_megatron_trainer.yaml of https://github.com/volcengine/verl.
"""

from __future__ import annotations

from typing import Any

from megarl.foreign.reading import Tables

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
KNOBS = {
    "actor_rollout_ref.model.path": "actor.path",
    f"{_ACTOR}.optim.lr": "actor.optimizer.lr",
    f"{_ACTOR}.optim.min_lr_ratio": "actor.optimizer.min_lr_ratio",
    f"{_ACTOR}.optim.clip_grad": "actor.optimizer.clip_grad",
    f"{_ACTOR}.grad_clip": "actor.optimizer.clip_grad",
    f"{_ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "actor.max_tokens_per_mb",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "parallel.cp_size",
    f"{_ACTOR}.megatron.tensor_model_parallel_size": "parallel.tp_size",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": "parallel.pp_size",
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": "parallel.vpp_size",
    f"{_ACTOR}.megatron.context_parallel_size": "parallel.cp_size",
    f"{_ACTOR}.megatron.expert_model_parallel_size": "parallel.ep_size",
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": "parallel.etp_size",
    f"{_ROLLOUT}.n": "gconfig.n_samples",
    f"{_ROLLOUT}.top_p": "gconfig.top_p",
    f"{_ROLLOUT}.top_k": "gconfig.top_k",
    f"{_ROLLOUT}.tensor_model_parallel_size": "server.tp_size",
    f"{_ROLLOUT}.gpu_memory_utilization": "sglang.mem_fraction_static",
    f"{_ROLLOUT}.max_model_len": "sglang.context_length",
    f"{_ROLLOUT}.max_num_seqs": "sglang.max_running_requests",
    "data.train_batch_size": "train_dataset.batch_size",
    "data.shuffle": "train_dataset.shuffle",
    "data.seed": "train_dataset.seed",
    "data.dataloader_num_workers": "train_dataset.num_workers",
    "critic.optim.lr": "critic_optimizer.lr",
    "trainer.experiment_name": "experiment_name",
    "trainer.project_name": "logger.wandb_project",
    "trainer.default_local_dir": "run_root",
    "trainer.val_before_train": "evaluator.at_start",
    "trainer.max_actor_ckpt_to_keep": "saver.keep",
    "trainer.total_training_steps": "total_train_steps",
}
CHOICES: dict[str, dict[Any, tuple[str, Any] | None]] = {
    "actor_rollout_ref.model.enable_gradient_checkpointing": {
        True: ("actor.recompute", "full"),
        False: ("actor.recompute", "none"),
    },
    f"{_ACTOR}.optim.lr_scheduler_type": {
        "constant": ("actor.optimizer.lr_decay_style", "constant"),
        "cosine": ("actor.optimizer.lr_decay_style", "cosine"),
    },
    f"{_ACTOR}.ppo_epochs": {1: None},
    f"{_ACTOR}.strategy": dict.fromkeys(("fsdp", "fsdp2", "megatron")),
    f"{_ROLLOUT}.name": {"sglang": None, "vllm": None},
    f"{_ROLLOUT}.do_sample": {True: None},
    f"{_ROLLOUT}.mode": {"sync": None, "async": None},
    f"{_ROLLOUT}.enforce_eager": {True: ("sglang.disable_cuda_graph", True), False: None},
    f"{_ROLLOUT}.dtype": {"bfloat16": ("server.dtype", "bfloat16"), "float16": ("server.dtype", "float16")},
    "data.truncation": {"error": None},
    "data.filter_overlong_prompts": {True: None},
    "data.return_raw_chat": {True: None, False: None},
    "data.prompt_key": {"prompt": None, "messages": None},
    "reward_model.enable": {False: None},
    "trainer.critic_warmup": {0: None},
    "trainer.resume_mode": {"disable": None},
    "trainer.balance_batch": {True: None, False: None},
}
_REASONS = {
    "microbatches are cut by actor.max_tokens_per_mb": tuple(
        f"{part}.{name}"
        for part, names in {
            _ACTOR: ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
            _ROLLOUT: (
                "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz",
                "log_prob_max_token_len_per_gpu",
            ),
            _REF: (
                "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz",
                "log_prob_max_token_len_per_gpu",
            ),
            "critic": ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"),
        }.items()
        for name in names
    ),
    "always packed": ("actor_rollout_ref.model.use_remove_padding", "critic.model.use_remove_padding"),
    "the loss is always fused with the head": ("actor_rollout_ref.model.use_fused_kernels",),
    "Megatron shards the optimizer": (
        f"{_ACTOR}.fsdp_config.fsdp_size", f"{_ACTOR}.fsdp_config.param_offload", f"{_ACTOR}.fsdp_config.grad_offload",
    ),
    "the reference has the actor's layout, and waits on the host": (
        f"{_REF}.fsdp_config.param_offload", f"{_REF}.megatron.param_offload",
        f"{_REF}.megatron.tensor_model_parallel_size", f"{_REF}.megatron.pipeline_model_parallel_size",
    ),
    "the critic starts from the policy, in its layout": ("critic.model.path",),
    "SGLang schedules requests itself": (
        f"{_ROLLOUT}.max_num_batched_tokens", f"{_ROLLOUT}.enable_chunked_prefill", f"{_ROLLOUT}.free_cache_engine",
    ),
    "evaluations take every row": ("data.val_batch_size",),
}  # fmt: skip
NEEDLESS = {key: reason for reason, keys in _REASONS.items() for key in keys}
_OWN_REWARD = "write f(completions, **columns), and give rewards.functions=[MODULE.FUNCTION] after --"
WHY_NOT = {
    "custom_reward_function.path": _OWN_REWARD,
    "custom_reward_function.name": _OWN_REWARD,
    "reward_model.enable": "rewards are functions; call the model from one",
    f"{_ROLLOUT}.do_sample": "the policy is trained on what it samples at its temperature",
    "data.truncation": "prompts are never cut; longer ones are skipped",
    "data.filter_overlong_prompts": "longer prompts are always skipped",
    "trainer.resume_mode": "go on with resume=RUN_FOLDER after --",
    f"{_ACTOR}.ppo_epochs": "each sampled batch is trained on once",
}
# Keys that `verl.py` converts itself.
LORA = {
    "rank": "actor_rollout_ref.model.lora_rank",
    "alpha": "actor_rollout_ref.model.lora_alpha",
    "targets": "actor_rollout_ref.model.target_modules",
}
LORA_DEFAULTS = {"alpha": 16, "targets": "all-linear"}  # verl's
OTHERS = (
    *LORA.values(),
    "algorithm.adv_estimator", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.gamma",
    "algorithm.kl_penalty", f"{_ACTOR}.kl_loss_type", "data.max_response_length",
    "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo", f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef",
    f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.clip_ratio", f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high",
    f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.optim.lr_warmup_steps", f"{_ROLLOUT}.temperature",
    "data.train_files", "data.val_files", "data.max_prompt_length", "trainer.logger", "trainer.nnodes",
    "trainer.n_gpus_per_node", "trainer.total_epochs", "trainer.save_freq", "trainer.test_freq",
)  # fmt: skip
# Keys without a counterpart, which ask for nothing where they are false.
OFF = frozenset((
    f"{_ACTOR}.shuffle", f"{_ACTOR}.use_torch_compile",
    f"{_ACTOR}.entropy_checkpointing",
    f"{_ACTOR}.entropy_from_logits_with_chunking",
    f"{_ACTOR}.fsdp_config.offload_policy",
    f"{_ACTOR}.fsdp_config.optimizer_offload",
    f"{_ACTOR}.fsdp_config.forward_prefetch", f"{_ACTOR}.megatron.param_offload",
    f"{_ACTOR}.megatron.grad_offload", f"{_ACTOR}.megatron.optimizer_offload",
    f"{_ACTOR}.megatron.use_dist_checkpointing", f"{_ACTOR}.megatron.use_mbridge",
    f"{_ACTOR}.profiler.enable", f"{_ACTOR}.profiler.all_ranks",
    "actor_rollout_ref.model.use_shm", "actor_rollout_ref.model.trust_remote_code",
    "actor_rollout_ref.model.enable_activation_offload", "actor_rollout_ref.model.use_liger",
    f"{_ROLLOUT}.ignore_eos", f"{_ROLLOUT}.disable_log_stats",
    f"{_ROLLOUT}.skip_rollout", f"{_ROLLOUT}.calculate_log_probs",
    f"{_ROLLOUT}.multi_turn.enable", f"{_ROLLOUT}.multi_stage_wake_up",
    f"{_ROLLOUT}.layered_summon", f"{_ROLLOUT}.val_kwargs.do_sample",
    f"{_ROLLOUT}.profiler.enable", f"{_REF}.use_torch_compile",
    f"{_REF}.entropy_from_logits_with_chunking", "algorithm.use_pf_ppo",
    "algorithm.filter_groups.enable", "data.return_raw_input_ids", "data.return_full_prompt",
    "data.return_multi_modal_inputs", "data.validation_shuffle", "data.trust_remote_code", "critic.shuffle",
    "reward_model.use_reward_loop", "reward_model.launch_reward_fn_async", "reward_model.enable_resource_pool",
    "trainer.val_only", "trainer.del_local_ckpt_after_load", "trainer.use_legacy_worker_impl",
))  # fmt: skip
TABLES = Tables(KNOBS, CHOICES, NEEDLESS, WHY_NOT, OTHERS, OFF)
# megarl's algorithm by verl's advantage estimator.
ESTIMATORS = {
    "gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp", "remax": "remax",
}  # fmt: skip
CLIPPED = ("grpo", "dr_grpo", "ppo", "reinforce_pp")  # algorithms with one clip range
AGGREGATES = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
