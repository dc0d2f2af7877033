"""Converts a TRL YAML, as `trl grpo --config` takes it, to megarl's knobs.

    python -m megarl.train --from-trl grpo grpo.yaml [KNOB=VALUE ...]

Every key sets knobs, is listed as needing no change, or is refused by name. Defaults of keys that are not given are
TRL's where they decide what is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.algorithms.base import UNBOUNDED
from megarl.data.sources import load_rows
from megarl.foreign.adapters import leave_adapters, set_adapters, set_quantised_base
from megarl.foreign.reading import Converted, Reading, reading_of
from megarl.foreign.trl_keys import (
    AGGREGATES,
    COMMANDS,
    CORRECTIONS,
    LORA,
    LORA_DEFAULTS,
    ROWS,
    SAMPLING,
    SCHEDULES,
    TABLES,
)
from megarl.foreign.yaml_file import load_yaml
from megarl.knobs import UserError, does_not_exist
from megarl.parallel.platform import takes_gpu_options


def read_trl(command: str, path: str, replicas: int | None = None, world: int = 1) -> Converted:
    """Converts a TRL YAML to overrides of knobs, and a table with each key's outcome.

    Args:
        command: TRL's command, such as grpo, whose configuration the file is.
        path: the file.
        replicas: number of data parallel ranks, as batch sizes count per device; by default `world`.
        world: number of trainer ranks.

    Raises:
        UserError: the file cannot be read, or some keys are not supported (all of them, one line each).
    """
    if command not in COMMANDS:
        raise UserError(does_not_exist(f"--from-trl {command}", command, list(COMMANDS)))
    values, lines = load_yaml(path, "--from-trl")
    reading = reading_of({str(key): value for key, value in values.items()}, lines)
    reading.overrides["experiment_name"] = Path(path).stem
    method, algorithm, rate, keys = COMMANDS[command]
    reading.set(f"trl {command}", None, "method", method)
    if algorithm:
        _algorithm(reading, command, algorithm, keys)
    if reading.flag("use_peft"):
        set_adapters(reading, LORA, LORA_DEFAULTS)
        set_quantised_base(reading)
    else:
        leave_adapters(reading, LORA, "use_peft")
    size = _data(reading, ROWS[method])
    _numbers(reading, rate)
    _batch(reading, method, command, replicas or world, size)
    return reading.finish(path, TABLES)


def _algorithm(reading: Reading, command: str, algorithm: str, keys: dict[str, tuple[str, float]]) -> None:
    """Sets the algorithm and its knobs; options of GRPO and DPO may select a variant."""
    if command == "grpo":
        algorithm = _grpo(reading)
    elif command == "dpo":
        names = {"sigmoid": "dpo", "ipo": "ipo"}
        loss = reading.text("loss_type", "sigmoid")
        if loss not in names:
            reading.refuse("loss_type", loss, f"is not one of {', '.join(names)}")
        algorithm = names.get(loss, algorithm)
        if algorithm == "ipo":
            keys = {"beta": keys["beta"]}
    if command in ("grpo", "rloo") and not reading.unread.get("reward_funcs"):
        reading.refuse("reward_funcs", reading.take("reward_funcs"), "names no function; give MODULE.FUNCTION")
    reading.overrides = {"algorithm": algorithm, **reading.overrides}
    reading.note(f"trl {command}", None, f"algorithm={algorithm}")
    for key, (knob, default) in keys.items():
        stated = key in reading.unread
        value = reading.number(key, default)
        reading.set(key, value, knob, value, "" if stated else "its default")
    if command == "rloo":
        reading.set("trl rloo", None, "algorithm.kl_in", "reward")
        reading.set("trl rloo", None, "algorithm.kl_estimator", "k1")
    if command == "grpo":
        _correction(reading)
    weights = reading.take("reward_weights")
    if weights is not None:
        knob = "algorithm.reward_weights" if algorithm == "gdpo" else "rewards.weights"
        reading.set("reward_weights", weights, knob, weights)


def _grpo(reading: Reading) -> str:
    """Name of the variant of GRPO, with its clip range and the mean of its loss."""
    loss = reading.text("loss_type", "dapo")
    scaled = reading.take("scale_rewards", "group")
    low = reading.number("epsilon", 0.2)
    high = reading.number("epsilon_high", low)
    algorithm = "grpo"
    if reading.unread.get("multi_objective_aggregation") == "normalize_then_sum":
        algorithm = "gdpo"
        reading.take("multi_objective_aggregation")
    elif reading.unread.get("importance_sampling_level") == "sequence":
        algorithm = "gspo"
        reading.take("importance_sampling_level")
    elif loss == "dr_grpo" and scaled in (False, "none"):
        algorithm = "dr_grpo"
    elif high != low:
        algorithm = "dapo"  # without dynamic sampling, DAPO is GRPO with two clip ranges
        reading.overrides["algorithm.dynamic_sampling"] = False
    if algorithm != "dr_grpo" and loss not in AGGREGATES:
        hint = "; dr_grpo needs scale_rewards: none" if loss == "dr_grpo" else ""
        reading.refuse("loss_type", loss, f"is not one of {', '.join(AGGREGATES)}{hint}")
    elif algorithm in ("grpo", "gdpo", "dapo", "gspo"):
        reading.set("loss_type", loss, "algorithm.aggregate", AGGREGATES[loss])
    if algorithm != "dr_grpo" and scaled not in (True, "group"):
        reading.refuse("scale_rewards", scaled, "is not group; for none use loss_type: dr_grpo too")
    if algorithm in ("dapo", "gspo"):
        reading.set("epsilon", low, "algorithm.clip_low", low)
        reading.set("epsilon_high", high, "algorithm.clip_high", high)
    elif high != low:
        reading.refuse("epsilon_high", high, f"differs from epsilon, which {algorithm} does not take")
    else:
        reading.set("epsilon", low, "algorithm.eps_clip", low)
    return algorithm


def _correction(reading: Reading) -> None:
    """Sets the weight by trainer/rollout probability, which TRL's GRPO has by default where vLLM samples."""
    vllm = reading.unread.get("use_vllm") is True
    corrects = SAMPLING["correction"] not in reading.unset and reading.flag(SAMPLING["correction"], True)
    if not (corrects and vllm):
        if vllm:
            reading.set(SAMPLING["correction"], False, "algorithm.correction", "none")
        why = f"{SAMPLING['correction']} is false" if vllm else "use_vllm is off"
        for key in [key for key in SAMPLING.values() if key in reading.unread]:
            reading.note(key, reading.take(key), f"no change: {why}")
        return
    stated, mode = SAMPLING["mode"] in reading.unread, reading.text(SAMPLING["mode"], "sequence_mask")
    if mode not in CORRECTIONS:
        reading.refuse(SAMPLING["mode"], mode, f"is not one of {', '.join(CORRECTIONS)}")
    correction, level = CORRECTIONS.get(mode, ("mask", "sequence"))
    note = "" if stated else "its default; TRL before 0.26 has token_truncate and 2.0"
    reading.set(SAMPLING["mode"], mode, "algorithm.correction", correction, note)
    reading.set(SAMPLING["mode"], mode, "algorithm.correction_level", level)
    _correction_bounds(reading, correction)
    if (top_p := reading.unread.get("top_p", 1)) != 1:
        reading.note("top_p", top_p, "algorithm.correction takes rollout probabilities before top_p, and TRL after it")


def _correction_bounds(reading: Reading, correction: str) -> None:
    """Sets the smallest and largest weight; a null upper bound is none."""
    low = reading.optional_number(SAMPLING["low"])
    if low and correction == "truncate":
        why = "raises smaller weights, which algorithm.correction=truncate leaves as they are"
        reading.refuse(SAMPLING["low"], low, why)
    reading.set(SAMPLING["low"], low, "algorithm.correction_low", low or 0.0)
    key = SAMPLING["cap"] if SAMPLING["cap"] in reading.unread else SAMPLING["high"]
    if key in reading.unset:
        if correction == "truncate":
            reading.refuse(key, None, "leaves nothing to truncate; give a number, or take a mask mode")
        reading.set(key, None, "algorithm.correction_high", UNBOUNDED, "no upper bound")
        return
    stated, high = key in reading.unread, reading.number(key, 3.0)
    reading.set(key, high, "algorithm.correction_high", high, "" if stated else "its default")
    if (unused := reading.take(SAMPLING["high"])) is not None:
        reading.note(SAMPLING["high"], unused, f"no change: {key} takes its place")


def _data(reading: Reading, kind: str) -> list[str]:
    """Sets the data sets. Returns path, split and name of the training rows."""
    path = reading.text("dataset_name")
    if not path:
        reading.refuse("dataset_name", path or None, "no data set is given")
    name, split = reading.text("dataset_config"), reading.text("dataset_train_split", "train")
    held_out = "dataset_test_split" in reading.unread
    test = reading.text("dataset_test_split", split)
    for dataset, part in (("train_dataset", split), ("valid_dataset", test)):
        source = {"path": path, "name": name, "split": part, "type": kind}
        reading.overrides[f"{dataset}.sources"] = [{key: value for key, value in source.items() if value}]
    reading.note("dataset_name", path, f"train_dataset.sources, type {kind}")
    if not held_out:
        reading.note("dataset_test_split", None, "evaluator.at_start=false, at_end=false: nothing is held out")
        reading.overrides.update({"evaluator.every_steps": 0, "evaluator.at_start": False, "evaluator.at_end": False})
    return [path, split, name]


def _numbers(reading: Reading, rate: float) -> None:
    """Sets the learning rate, its schedule and dtypes."""
    reading.set("learning_rate", lr := reading.number("learning_rate", rate), "actor.optimizer.lr", lr)
    schedule = reading.text("lr_scheduler_type", "linear")
    if schedule not in SCHEDULES:
        reading.refuse("lr_scheduler_type", schedule, f"is not one of {', '.join(SCHEDULES)}")
    else:
        reading.set("lr_scheduler_type", schedule, "actor.optimizer.lr_decay_style", SCHEDULES[schedule])
    for key in ("dtype", "torch_dtype"):
        stated, named = key in reading.unread, reading.text(key, "auto")
        if named not in ("auto", "bfloat16", "float32"):
            reading.refuse(key, named, "is not one of auto, bfloat16, float32")
        elif stated:
            reading.note(key, named, "no change: bf16 sets the dtype")
    bf16 = reading.flag("bf16", True) and takes_gpu_options()
    dtype = "bfloat16" if bf16 else "float32"
    for knob in ("actor.dtype", "server.dtype"):
        reading.set("bf16", bf16, knob, dtype)


def _batch(reading: Reading, method: str, command: str, replicas: int, data: list[str]) -> None:
    """Sets batch sizes, lengths and steps, which depend on each other."""
    per_device = reading.whole("per_device_train_batch_size", 8, 1)
    accumulated = reading.whole("gradient_accumulation_steps", 1, 1)
    rows, samples = per_device * accumulated * replicas, 1
    length = reading.optional_number("max_length")
    if method == "rl":
        completion = reading.whole("max_completion_length", 256, 1)
        reading.set("max_completion_length", completion, "gconfig.max_new_tokens", completion)
        samples = reading.whole("num_generations", 2 if command == "rloo" else 8, 1)
        reading.set("num_generations", samples, "gconfig.n_samples", samples)
        temperature = reading.number("temperature", 1.0)
        for knob in ("gconfig.temperature", "actor.temperature"):
            reading.set("temperature", temperature, knob, temperature)
        if reading.overrides["algorithm"] == "dr_grpo":
            reading.overrides["algorithm.aggregate_tokens"] = completion
        for key, sampled in (("generation_batch_size", rows), ("steps_per_generation", accumulated)):
            if (value := reading.whole(key, sampled, 1)) != sampled:
                reading.refuse(key, value, f"must be {sampled}: each sampled batch is trained on in one step")
    elif length:
        for name in ("train_dataset", "valid_dataset"):
            reading.set("max_length", length, f"{name}.max_length", int(length))
    if rows % samples:
        reading.refuse(
            "per_device_train_batch_size", per_device, f"x gradient_accumulation_steps {accumulated} x {replicas} "
            f"ranks = {rows} completions is not a multiple of num_generations={samples}",
        )  # fmt: skip
        return
    batch = rows // samples
    key = "per_device_train_batch_size x gradient_accumulation_steps"
    reading.set(key, [per_device, accumulated], "train_dataset.batch_size", batch, f"of {replicas} ranks")
    _steps(reading, batch, data)


def _steps(reading: Reading, batch: int, data: list[str]) -> None:
    """Sets the steps of the run and the knobs that count in steps."""
    epochs, steps = reading.number("num_train_epochs", 3.0), reading.whole("max_steps", -1, -1)
    total: int = steps
    if steps < 1 and not reading.refused:
        per_epoch = max(len(load_rows(*data)) // batch, 1)
        total = max(int(epochs * per_epoch), 1)
        reading.set("num_train_epochs", epochs, "total_train_steps", total, f"{epochs:g} x {per_epoch} batches")
    elif steps > 0:
        reading.set("max_steps", steps, "total_train_steps", steps)
    ratio, warmup = reading.number("warmup_ratio", 0.0), reading.number("warmup_steps", 0)
    share: Any = ratio if ratio and not warmup else warmup
    reading.set(
        "warmup_steps", share, "actor.optimizer.warmup_steps", int(share * max(total, 1) if share < 1 else share)
    )
    for key, knob in (("save_steps", "saver.every_steps"), ("eval_steps", "evaluator.every_steps")):
        if key in reading.unread:
            every = reading.number(key, 500)
            reading.set(key, every, knob, max(int(every * max(total, 1)), 1) if every < 1 else int(every))
