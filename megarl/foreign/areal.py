"""Reads an AReaL YAML: `python -m megarl.launcher.local SCRIPT.py --from-areal gsm8k_grpo.yaml [KNOB=VALUE ...]`.

Every key sets knobs, is listed as needing no change, or is refused by name. Keys and the grammar of `allocation_mode`
come from AReaL's modules cli_args and alloc_mode (https://github.com/inclusionAI/AReaL).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.foreign.reading import Converted, Reading, Tables, flat, load_yaml
from megarl.knobs import UserError

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
}
_REASONS = {
    "one name for a run": tuple(
        f"{part}.{name}"
        for part in ("rollout", "actor", "ref", "saver", "checkpointer", "evaluator", "stats_logger", "recover")
        for name in ("experiment_name", "trial_name", "fileroot")
    ),
    "the run's folder carries the time": ("trial_name",),
    "the tokenizer is the checkpoint's": ("tokenizer_path",),
    "one backend, Megatron": ("actor.backend", "ref.backend", "actor.disable_dropout"),
    "the reference is the start policy": ("ref.path", "ref.init_from_scratch", "ref.mb_spec.max_tokens_per_mb"),
    "the group is gconfig.n_samples": ("actor.group_size",),
    "a batch's prompts bound it": (
        "rollout.max_concurrent_rollouts", "rollout.queue_size", "rollout.consumer_batch_size",
        "rollout.enable_rollout_tracing",
    ),
    "the servers belong to the run": ("sglang.model_path", "sglang.random_seed", "sglang.skip_tokenizer_init"),
    "launchers meet through the run's folder": (
        "cluster.name_resolve.type", "cluster.name_resolve.nfs_record_root", "cluster.cluster_name",
    ),
    "memory is pinned where it is copied": ("train_dataset.pin_memory", "valid_dataset.pin_memory"),
    "checkpoints are counted in steps": (
        "saver.freq_epochs", "saver.freq_secs", "checkpointer.freq_epochs", "checkpointer.freq_secs",
        "checkpointer.freq_steps", "evaluator.freq_epochs", "evaluator.freq_secs",
    ),
}  # fmt: skip
WHY_NOT = {
    "actor.group_adv_norm": "GRPO normalises over the group; use algorithm=reinforce for none",
    "actor.reward_scaling": "scale rewards in the reward function",
    "actor.reward_bias": "shift rewards in the reward function",
    "actor.recompute_logprob": "the trainer's log-probs are always computed",
    "total_train_epochs": "megarl counts steps; give total_train_steps=N after the file too",
}
OTHERS = (
    "allocation_mode", "async_training", "total_train_epochs", "cluster.n_nodes", "actor.use_decoupled_loss",
    "actor.kl_ctl", "actor.behav_imp_weight_cap", "actor.optimizer.warmup_steps_proportion", "stats_logger.wandb.mode",
)  # fmt: skip
NEEDLESS = {key: reason for reason, keys in _REASONS.items() for key in keys}
TABLES = Tables(KNOBS, CHOICES, NEEDLESS, WHY_NOT, OTHERS)
_PART = re.compile(
    r"(?P<backend>sglang|vllm|fsdp|megatron|archon)?(?:[\[(](?P<name>\w+)[\])])?[:.]?(?P<sizes>(?:[dptce]\d+)+)"
)
LAYOUT = {"d": "dp_size", "p": "pp_size", "t": "tp_size", "c": "cp_size", "e": "ep_size"}


def read_areal(path: str) -> Converted:
    """Converts an AReaL YAML.

    Raises:
        UserError: the file cannot be read, or some keys are not supported (all of them, one line each).
    """
    reading = Reading(flat(_resolved(path)))
    reading.overrides["experiment_name"] = Path(path).stem
    reading.set("actor", None, "method", "rl")
    if reading.flag("actor.use_decoupled_loss"):
        reading.overrides = {"algorithm": "decoupled_ppo", **reading.overrides}
        reading.note("actor.use_decoupled_loss", True, "algorithm=decoupled_ppo")
        cap = reading.optional_number("actor.behav_imp_weight_cap")
        if cap is not None:
            reading.set("actor.behav_imp_weight_cap", cap, "algorithm.correction_high", cap)
    else:
        reading.overrides = {"algorithm": "grpo", **reading.overrides}
        reading.take("actor.behav_imp_weight_cap")
    coef = reading.optional_number("actor.kl_ctl")
    if coef is not None:
        for knob, value in (("kl_coef", coef), ("kl_in", "reward"), ("kl_estimator", "k1")):
            reading.set("actor.kl_ctl", coef, f"algorithm.{knob}", value)
    if not reading.flag("async_training", True):
        reading.take("rollout.max_head_offpolicyness")
        reading.set("async_training", False, "rollout.max_head_offpolicyness", 0)
    mode = reading.text("allocation_mode")
    if mode:
        _allocation(reading, mode)
    nodes = reading.whole("cluster.n_nodes", 1, 1)
    if nodes > 1:
        reading.note("cluster.n_nodes", nodes, "the launcher's: slurm or ray place the ranks of the layout")
    epochs = reading.take("total_train_epochs")
    if epochs is not None and "total_train_steps" not in reading.unread:
        reading.note("total_train_epochs", epochs, "the script's own loop; total_train_steps is the schedule's length")
    share = reading.number("actor.optimizer.warmup_steps_proportion", 0.0)
    steps = reading.unread.get("total_train_steps", 100)
    if isinstance(steps, int) and not isinstance(steps, bool) and 0 <= share < 1:
        key = "actor.optimizer.warmup_steps_proportion"
        reading.set(key, share, "actor.optimizer.warmup_steps", int(share * steps))
    if (wandb := reading.text("stats_logger.wandb.mode", "disabled")) != "disabled":
        reading.set("stats_logger.wandb.mode", wandb, "logger.wandb", True)
    return reading.finish(path, TABLES)


def _resolved(path: str) -> dict[str, Any]:
    """The file's mapping, with references such as `${actor.path}` replaced.

    Raises:
        UserError: the file cannot be read, or refers to a key that it lacks.
    """
    values = load_yaml(path, "--from-areal")
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"--from-areal {path} cannot be read ({first})") from error
    return dict(resolved)


def _allocation(reading: Reading, mode: str) -> None:
    """Sets the layouts in `allocation_mode`, such as `sglang:d4t2+fsdp:d4` or the older `sglang.d4p1t1+d4p1t1`."""
    parts = [_PART.fullmatch(part.strip()) for part in mode.split("+")]
    if "|" in mode:
        return reading.refuse("allocation_mode", mode, "shares GPUs; use server.colocate=true")
    if len(parts) > 2 or not all(parts):
        return reading.refuse("allocation_mode", mode, "is not SERVERS+TRAINER, such as sglang:d4t2+megatron:d2t2p1c1")
    for part in parts:
        assert part is not None, "checked above"
        sizes = {letter: int(number) for letter, number in re.findall(r"([dptce])(\d+)", part["sizes"])}
        if any(size < 1 for size in sizes.values()):
            reading.refuse("allocation_mode", mode, "has a size of 0")
        elif part["backend"] in ("sglang", "vllm"):
            _servers(reading, mode, sizes)
        else:
            for letter, size in sizes.items():
                reading.set("allocation_mode", mode, f"parallel.{LAYOUT[letter]}", size)


def _servers(reading: Reading, mode: str, sizes: dict[str, int]) -> None:
    """Sets the number and size of the servers."""
    if any(sizes.get(letter, 1) > 1 for letter in "pc"):
        return reading.refuse("allocation_mode", mode, "has servers with p or c above 1; weights reach t and e alone")
    reading.set("allocation_mode", mode, "server.n_servers", sizes.get("d", 1))
    reading.set("allocation_mode", mode, "server.tp_size", sizes.get("t", 1))
    if sizes.get("e", 1) > 1:
        reading.set("allocation_mode", mode, "sglang.ep_size", sizes["e"])
