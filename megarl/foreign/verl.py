"""Converts a verl command line to megarl's knobs.

    python -m megarl.train --from-verl algorithm.adv_estimator=grpo ... [-- KNOB=VALUE ...]

What follows `python3 -m verl.trainer.main_ppo` in a script follows `--from-verl` here; `--` begins megarl's own knobs.
Every key sets knobs, is listed as needing no change, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from megarl.data.sources import load_rows
from megarl.foreign.adapters import leave_adapters, set_adapters
from megarl.foreign.reading import Converted, Reading, number_of, plain
from megarl.foreign.verl_keys import AGGREGATES, CLIPPED, ESTIMATORS, KL_ESTIMATORS, LORA, LORA_DEFAULTS, TABLES
from megarl.knobs import UserError

ACTOR = "actor_rollout_ref.actor"
DEFAULT_BATCH = 1024  # verl's data.train_batch_size
# Keys -> the knob, and verl's default. Actor and critic: verl/trainer/config/actor/actor.yaml, critic/critic.yaml.
DEFAULTS = {f"{ACTOR}.optim.weight_decay": ("actor.optimizer.weight_decay", 0.01)}
PPO_DEFAULTS = {
    f"{ACTOR}.clip_ratio_c": ("algorithm.dual_clip", 3.0),
    "critic.cliprange_value": ("algorithm.value_clip", 0.5),
    "critic.optim.lr": ("critic_optimizer.lr", 1e-5),
    "critic.optim.weight_decay": ("critic_optimizer.weight_decay", 0.01),
}


def read_verl(arguments: Sequence[str]) -> Converted:
    """Converts verl's overrides. Defaults of keys that are not given are verl's where they decide what is trained.

    Raises:
        UserError: an argument is no KEY=VALUE, or some keys are not supported (all of them, one line each).
    """
    reading = Reading(_keys(arguments))
    reading.set("verl.trainer.main_ppo", None, "method", "rl")
    _algorithm(reading)
    if reading.unread.get(LORA["rank"]):
        set_adapters(reading, LORA, LORA_DEFAULTS)
    else:
        leave_adapters(reading, LORA, LORA["rank"])
    sources = _data(reading)
    _machines(reading)
    _schedule(reading, sources)
    return reading.finish("the verl command line", TABLES)


def _keys(arguments: Sequence[str]) -> dict[str, Any]:
    """Values by key. Hydra's options for configuration files need no change, as the keys are the same in both."""
    keys: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name in ("--config-path", "--config-name", "--config-dir"):
            continue
        if not equals or not name.strip("+~") or name.startswith("-"):
            raise UserError(
                f"--from-verl takes KEY=VALUE as verl does, got {plain(argument)}; `--` begins megarl's knobs"
            )
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            value = text
        if value is not None:
            keys[name.lstrip("+")] = number_of(value)
    return keys


def _algorithm(reading: Reading) -> None:
    """Sets the algorithm, its clip range, KL penalty and minibatches."""
    estimator = reading.text("algorithm.adv_estimator", "gae")
    if estimator not in ESTIMATORS:
        reading.refuse("algorithm.adv_estimator", estimator, f"is not one of {', '.join(ESTIMATORS)}")
    algorithm = ESTIMATORS.get(estimator, "grpo")
    if algorithm == "grpo" and not reading.flag("algorithm.norm_adv_by_std_in_grpo", True):
        algorithm = "dr_grpo"
    algorithm = _clip(reading, algorithm)
    reading.overrides = {"algorithm": algorithm, **reading.overrides}
    reading.note("algorithm.adv_estimator", estimator, f"algorithm={algorithm}")
    aggregate = reading.text(f"{ACTOR}.loss_agg_mode", "token-mean")
    if aggregate not in AGGREGATES:
        reading.refuse(f"{ACTOR}.loss_agg_mode", aggregate, f"is not one of {', '.join(AGGREGATES)}")
    else:
        reading.set(f"{ACTOR}.loss_agg_mode", aggregate, "algorithm.aggregate", AGGREGATES[aggregate])
    _kl(reading)
    for key, (knob, default) in {**DEFAULTS, **(PPO_DEFAULTS if algorithm == "ppo" else {})}.items():
        stated, value = key in reading.unread, reading.number(key, default)
        reading.set(key, value, knob, value, "" if stated else "its default")
    for key, knob in (("algorithm.gamma", "algorithm.gamma"), ("algorithm.lam", "algorithm.gae_lambda")):
        value = reading.number(key, 1.0)
        if algorithm == "ppo":
            reading.set(key, value, knob, value)
        elif value != 1:
            reading.refuse(key, value, f"{algorithm} has no discount; leave it out")


def _clip(reading: Reading, algorithm: str) -> str:
    """Sets the clip range. Returns the algorithm, which two bounds may change."""
    keys = [f"{ACTOR}.clip_ratio{suffix}" for suffix in ("", "_low", "_high")]
    stated = [key for key in keys if key in reading.unread]
    clip = reading.number(keys[0], 0.2)
    low, high = (reading.number(key, clip) for key in keys[1:])
    if algorithm == "grpo" and low != high:
        reading.overrides["algorithm.dynamic_sampling"] = False
        reading.set(keys[1], low, "algorithm.clip_low", low)
        reading.set(keys[2], high, "algorithm.clip_high", high)
        return "dapo"  # without dynamic sampling, DAPO is GRPO with two clip ranges
    if algorithm not in CLIPPED:
        for key in stated:
            reading.refuse(key, clip if key == keys[0] else low if key == keys[1] else high, f"{algorithm} has no clip")
    elif low != high:
        reading.refuse(keys[2], high, f"differs from the lower one, which {algorithm} does not take")
    else:
        reading.set(keys[0], low, "algorithm.eps_clip", low)
    return algorithm


def _kl(reading: Reading) -> None:
    """Sets the KL penalty, in the loss or in the reward."""
    in_loss, in_reward = reading.flag(f"{ACTOR}.use_kl_loss"), reading.flag("algorithm.use_kl_in_reward")
    coefs = reading.number(f"{ACTOR}.kl_loss_coef", 0.001), reading.number("algorithm.kl_ctrl.kl_coef", 0.001)
    if in_loss and in_reward:
        reading.refuse(f"{ACTOR}.use_kl_loss", True, "and algorithm.use_kl_in_reward both add a KL; choose one")
    coef, key = (coefs[0], f"{ACTOR}.kl_loss_coef") if in_loss else (coefs[1], "algorithm.kl_ctrl.kl_coef")
    reading.set(
        key, coef, "algorithm.kl_coef", coef if in_loss or in_reward else 0.0, "" if in_loss or in_reward else "off"
    )
    if in_loss or in_reward:
        reading.set(f"{ACTOR}.use_kl_loss", in_loss, "algorithm.kl_in", "loss" if in_loss else "reward")
    kinds = ((f"{ACTOR}.kl_loss_type", "low_var_kl", in_loss), ("algorithm.kl_penalty", "kl", in_reward))
    for key, default, used in kinds:
        stated, kind = key in reading.unread, reading.text(key, default)
        if kind not in KL_ESTIMATORS:
            reading.refuse(key, kind, f"is not one of {', '.join(KL_ESTIMATORS)}")
        elif used:
            reading.set(key, kind, "algorithm.kl_estimator", KL_ESTIMATORS[kind], "" if stated else "its default")
        elif stated:
            reading.note(key, kind, "no change: this KL is off")


def _data(reading: Reading) -> list[str]:
    """Sets the files, and lengths of prompts. Returns the training files."""
    found: dict[str, list[str]] = {}
    for key, name in (("data.train_files", "train_dataset"), ("data.val_files", "valid_dataset")):
        files = reading.take(key)
        files = [files] if isinstance(files, str) else files
        if not isinstance(files, list) or not files or not all(isinstance(file, str) and file for file in files):
            reading.refuse(key, files, "must name files")
            continue
        found[key] = files
        reading.overrides[f"{name}.sources"] = [{"path": file, "split": "train", "type": "messages"} for file in files]
        reading.note(key, files, f"{name}.sources, type messages: rows with `prompt`")
    length = reading.whole("data.max_prompt_length", 512, 1)
    for name in ("train_dataset", "valid_dataset"):
        reading.set("data.max_prompt_length", length, f"{name}.max_length", length)
    response = reading.whole("data.max_response_length", 512, 1)
    reading.set("data.max_response_length", response, "gconfig.max_new_tokens", response)
    if reading.overrides.get("algorithm.aggregate") == "constant":
        reading.set("data.max_response_length", response, "algorithm.aggregate_tokens", response)
    temperature = reading.number("actor_rollout_ref.rollout.temperature", 1.0)
    for knob in ("gconfig.temperature", "actor.temperature"):
        reading.set("actor_rollout_ref.rollout.temperature", temperature, knob, temperature)
    return found.get("data.train_files", [])


def _machines(reading: Reading) -> None:
    """Sets GPUs and dtypes. verl trains and samples on the same GPUs in turn."""
    nodes, per_node = reading.whole("trainer.nnodes", 1, 1), reading.whole("trainer.n_gpus_per_node", 8, 0)
    if not per_node:
        reading.note("trainer.n_gpus_per_node", 0, "no GPU: float32 on this machine's CPUs")
        return
    reading.set("trainer.n_gpus_per_node", per_node, "cluster.gpus_per_node", per_node)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = [reading.unread.get(f"{ACTOR}.megatron.{name}", 1) for name in names]
    sizes += [reading.unread.get(f"{ACTOR}.ulysses_sequence_parallel_size", 1)]
    of_server, total = reading.unread.get("actor_rollout_ref.rollout.tensor_model_parallel_size", 2), nodes * per_node
    reading.unread["actor_rollout_ref.rollout.tensor_model_parallel_size"] = of_server  # verl's default
    model = 1
    for size in sizes:
        model *= size if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= total else 1
    if not isinstance(of_server, int) or isinstance(of_server, bool) or not 0 < of_server <= total:
        reading.refuse("actor_rollout_ref.rollout.tensor_model_parallel_size", of_server, f"must be 1 to {total}")
    elif total % model or total % of_server:
        reading.refuse("trainer.n_gpus_per_node", per_node, f"makes {total} GPUs, which the layout does not divide")
    else:
        reading.set("trainer.nnodes", nodes, "parallel.dp_size", total // model)
        reading.set("trainer.nnodes", nodes, "server.n_servers", total // of_server)
        reading.overrides["server.colocate"] = True
    for knob in ("actor.dtype", "server.dtype"):
        reading.overrides[knob] = "bfloat16"


def _schedule(reading: Reading, files: list[str]) -> None:
    """Sets batch sizes, steps, checkpoints, evaluations and loggers."""
    batch = reading.whole("data.train_batch_size", DEFAULT_BATCH, 1)
    reading.set("data.train_batch_size", batch, "train_dataset.batch_size", batch)
    mini = reading.whole(f"{ACTOR}.ppo_mini_batch_size", 256, 1)
    if batch % mini:
        reading.refuse(f"{ACTOR}.ppo_mini_batch_size", mini, f"does not divide data.train_batch_size={batch}")
    else:
        reading.set(f"{ACTOR}.ppo_mini_batch_size", mini, "algorithm.n_minibatches", batch // mini)
    warmup = reading.number(f"{ACTOR}.optim.lr_warmup_steps", -1, -1)
    reading.set(f"{ACTOR}.optim.lr_warmup_steps", warmup, "actor.optimizer.warmup_steps", max(int(warmup), 0))
    epochs = reading.whole("trainer.total_epochs", 30, 1)
    if "trainer.total_training_steps" not in reading.unread and not reading.refused:
        size = sum(len(load_rows(file, "train")) for file in files)
        steps = max(epochs * (size // batch), 1)
        reading.set("trainer.total_epochs", epochs, "total_train_steps", steps, f"{epochs} x {size // batch} batches")
    for key, knob in (("trainer.save_freq", "saver.every_steps"), ("trainer.test_freq", "evaluator.every_steps")):
        every = reading.whole(key, -1, -1)
        reading.set(key, every, knob, max(every, 0))
    loggers = reading.take("trainer.logger", ["console", "wandb"])
    loggers = [loggers] if isinstance(loggers, str) else loggers
    if not isinstance(loggers, list) or any(name not in ("console", "wandb", "tensorboard") for name in loggers):
        reading.refuse("trainer.logger", loggers, "must be a list of console, wandb and tensorboard")
        return
    for name in ("wandb", "tensorboard"):
        reading.set("trainer.logger", loggers, f"logger.{name}", name in loggers)
