"""Converts the axolotl YAML of an RLHF method to megarl's knobs.

    python -m megarl.train --from-axolotl grpo.yaml [KNOB=VALUE ...]

Every key sets knobs, is listed as needing no change, or is refused by name. Plain keys are looked up in the tables of
`keys.py`. This module converts the keys that depend on each other: algorithms, data sets, batch sizes, steps.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megarl.axolotl.keys import (
    ADAPTER_KEYS,
    ALGORITHMS,
    DATASET_OPTIONS,
    LORA,
    LOSS_TYPES,
    MESSAGE_FIELDS,
    NO_ADAPTERS,
    TABLES,
    TEXTS,
    UNKNOWN_ADAPTERS,
)
from megarl.axolotl.source_types import SOURCE_TYPES
from megarl.data.config import SourceConfig
from megarl.data.preference import format_of
from megarl.data.sources import load_rows
from megarl.foreign.adapters import set_adapters, set_quantised_base
from megarl.foreign.reading import Converted, Origin, Reading, plain, reading_of
from megarl.foreign.yaml_file import load_yaml
from megarl.knobs import MAX_COUNT, UserError
from megarl.parallel.platform import takes_gpu_options


def read_axolotl(path: str, replicas: int | None = None, world: int = 1) -> Converted:
    """Converts an axolotl YAML into overrides for `cli.load`.

    Args:
        path: The YAML file.
        replicas: Number of data-parallel ranks, as axolotl's batch sizes count per rank. By default the ranks in
            `world` divided by the context- and tensor-parallel sizes.
        world: Number of trainer ranks.

    Raises:
        UserError: the file cannot be read, or some keys are not supported (all of them, one line each).
    """
    values, lines = load_yaml(path, "--from-axolotl")
    reading = reading_of(_flat(values), lines)
    reading.overrides["experiment_name"] = Path(path).stem
    rl = reading.take("rl")
    if not isinstance(rl, str) or rl not in ALGORITHMS:
        raise UserError(f"{lines.at('rl') or path}: rl: {plain(rl)} is not one of {', '.join(ALGORITHMS)}")
    method, algorithm, keys = ALGORITHMS[rl]
    for key in TEXTS:
        if not isinstance(reading.unread.get(key, ""), str):
            reading.refuse(key, reading.take(key), "must be text")
    reading.set("rl", rl, "method", method)
    _adapters(reading)
    if method == "rl" and not reading.unread.get("trl.reward_funcs"):
        reading.refuse("trl.reward_funcs", reading.take("trl.reward_funcs"), "names no function; give MODULE.FUNCTION")
    _algorithm(reading, rl, algorithm, keys)
    train = _data(reading, rl)
    if replicas is None:
        sizes = (reading.unread.get(key, 1) for key in ("context_parallel_size", "tensor_parallel_size"))
        replicas = max(world // math.prod(size for size in sizes if isinstance(size, int) and size > 0), 1)
    _lengths_and_batch(reading, rl, replicas, train)
    _numerics(reading)
    return reading.finish(path, TABLES)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Flattens the sections `trl` and `vllm` to dotted keys."""
    inside = {f"{s}.{k}": v for s in ("trl", "vllm") if isinstance(values.get(s), dict) for k, v in values[s].items()}
    flat = {**{k: v for k, v in values.items() if not (k in ("trl", "vllm") and isinstance(v, dict))}, **inside}
    return {str(k): v for k, v in flat.items()}


def _adapters(reading: Reading) -> None:
    """Sets the knobs of `adapter: lora` and `qlora`. Refuses other keys of adapters, all in one line."""
    kind = reading.unread.get("adapter")
    if kind in ("lora", "qlora"):
        reading.note("adapter", reading.take("adapter"), "see lora_r")
        if kind == "qlora" and reading.unread.get("load_in_4bit") is not True:
            reading.refuse("adapter", kind, "has a base of 4 bits; add load_in_4bit: true, or set adapter: lora")
        set_quantised_base(reading)
        if reading.unread.get("lora_target_linear") and not reading.unread.get("lora_target_modules"):
            reading.set("lora_target_linear", reading.take("lora_target_linear"), "actor.lora.targets", ["all-linear"])
            set_adapters(reading, {knob: key for knob, key in LORA.items() if knob != "targets"}, {"rank": 0})
        else:
            set_adapters(reading, LORA, {"rank": 0, "targets": []})
        if (value := reading.take("rl_adapter_ref_model")) is not None:
            reading.note("rl_adapter_ref_model", value, "no change: the reference is the base, without the adapters")
    named = [key for key in reading.unread if key in ADAPTER_KEYS or key.startswith(("lora_", "peft", "adapter"))]
    values = {key: reading.take(key) for key in named}
    if wanted := [key for key, value in values.items() if value not in (False, 0, 0.0, "", [])]:
        why = UNKNOWN_ADAPTERS if kind in ("lora", "qlora") else NO_ADAPTERS
        reading.refuse(", ".join(wanted), values[wanted[0]], why)
    for key in set(named) - set(wanted):
        reading.note(key, values[key], "no change: it is off")


def _algorithm(reading: Reading, rl: str, algorithm: str, keys: dict[str, tuple[str, Any]]) -> None:
    """Sets the algorithm, its knobs and the reward weights. Options of `rl: grpo` may select a variant of GRPO."""
    if rl == "grpo":
        loss = reading.take("trl.loss_type")
        if reading.unread.get("trl.multi_objective_aggregation") == "normalize_then_sum":
            algorithm = "gdpo"
            reading.take("trl.multi_objective_aggregation")
        elif reading.unread.get("trl.importance_sampling_level") == "sequence":
            algorithm = "gspo"
            reading.take("trl.importance_sampling_level")
        elif loss == "dr_grpo" or (
            reading.unread.get("trl.scale_rewards") is False
            and loss in LOSS_TYPES
            and "trl.epsilon_high" not in reading.unread
        ):
            algorithm = _unscaled(reading)
        elif "trl.epsilon_high" in reading.unread:
            algorithm = "dapo"  # without dynamic sampling, DAPO is GRPO with two clip ranges
            reading.overrides["algorithm.dynamic_sampling"] = False
        elif loss not in LOSS_TYPES:
            reading.refuse("trl.loss_type", loss, f"is not one of {', '.join(k for k in LOSS_TYPES if k)}, dr_grpo")
        if loss in LOSS_TYPES and algorithm in ("grpo", "gdpo", "dapo", "dr_grpo", "gspo"):
            reading.set("trl.loss_type", loss, "algorithm.aggregate", LOSS_TYPES[loss])
    if rl == "gdpo" and reading.unread.get("trl.multi_objective_aggregation") == "normalize_then_sum":
        reading.take("trl.multi_objective_aggregation")
    reading.overrides = {"algorithm": algorithm, **reading.overrides}
    reading.note("rl", rl, f"algorithm={algorithm}")
    if algorithm in ("gspo", "dapo"):
        low = reading.number("trl.epsilon", 0.2)
        reading.set("trl.epsilon", low, "algorithm.clip_low", low)
        high = reading.number("trl.epsilon_high", low)
        reading.set("trl.epsilon_high", high, "algorithm.clip_high", high)
        keys = {key: knob for key, knob in keys.items() if key != "trl.epsilon"}
    if "rl_beta" in keys:  # axolotl takes either name, trl.beta first
        reading.unread["rl_beta"] = reading.take("trl.beta", reading.unread.get("rl_beta"))
        reading.unread = {key: value for key, value in reading.unread.items() if value is not None}
    for key, (knob, default) in keys.items():
        value = reading.take(key)
        reading.set(key, value, knob, default if value is None else value, "" if value is not None else "its default")
    weights = reading.take("trl.reward_weights")
    if weights is not None:
        knob = "algorithm.reward_weights" if algorithm == "gdpo" else "rewards.weights"
        reading.set("trl.reward_weights", weights, knob, weights)


def _unscaled(reading: Reading) -> str:
    """Name of the GRPO that does not divide advantages by their deviation; `trl.scale_rewards` must not ask for it."""
    scaled = reading.take("trl.scale_rewards")
    if scaled not in (None, False):
        reading.refuse("trl.scale_rewards", scaled, "is not false, and trl.loss_type: dr_grpo does not scale")
    elif scaled is False:
        reading.note("trl.scale_rewards", False, "algorithm=dr_grpo")
    return "dr_grpo"


def _data(reading: Reading, rl: str) -> list[SourceConfig]:
    """Sets the training and the validation data. Returns the training sources."""
    train = _sources(reading, "datasets", rl)
    valid = _sources(reading, "test_datasets", rl) if "test_datasets" in reading.unread else None
    held_out = reading.take("val_set_size", 0)
    if not train:
        reading.refuse("datasets", None, "no data set is given")
    if valid is None and held_out:
        cut = "-1"
        if any("[" in source.split for source in train):
            reading.refuse("val_set_size", held_out, "cannot be cut off a split that is a slice; give test_datasets")
        elif isinstance(held_out, float) and 0 < held_out < 1:
            cut = f"{100 - round(100 * held_out)}%"
        elif type(held_out) is int and held_out > 0 and len(train) == 1:
            cut = f"-{held_out}"
        else:
            reading.refuse(
                "val_set_size", held_out, "must be a fraction below 1, or a number of rows if there is one data set"
            )
        valid = [_with_split(source, f"{source.split}[{cut}:]") for source in train]
        train = [_with_split(source, f"{source.split}[:{cut}]") for source in train]
        reading.note("val_set_size", held_out, f"the last rows are held out: {valid[0].split if valid else ''}")
    if valid is None:
        valid = train
        reading.note("val_set_size", None, "evaluator.at_start=false, at_end=false: nothing is held out")
        reading.overrides.update({"evaluator.every_steps": 0, "evaluator.at_start": False, "evaluator.at_end": False})
    for name, sources in (("train_dataset", train), ("valid_dataset", valid)):
        reading.overrides[f"{name}.sources"] = [_source_override(source) for source in sources]
    return train


def _with_split(source: SourceConfig, split: str) -> SourceConfig:
    return SourceConfig(source.path, source.name, split, source.type, source.options)


def _source_override(source: SourceConfig) -> dict[str, Any]:
    values = {"path": source.path, "name": source.name, "split": source.split, "type": source.type}
    return {**{k: v for k, v in values.items() if v}, **({"options": source.options} if source.options else {})}


def _sources(reading: Reading, key: str, rl: str) -> list[SourceConfig]:
    """Converts a list of axolotl data sets. A data set of several files becomes several sources."""
    entries = reading.take(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        reading.refuse(key, entries, "must be a list of data sets")
        return []
    sources: list[SourceConfig] = []
    for i, entry in enumerate(entries):
        where, entry = f"{key}[{i}]", {k: v for k, v in entry.items() if v is not None}
        if not _is_well_typed(reading, where, entry):
            continue
        files, path = entry.pop("data_files", None), entry.pop("path", "")
        kind: Any = entry.pop("type", "")
        options: dict[str, Any] = {name: entry.pop(name) for name in DATASET_OPTIONS if name in entry}
        for old, new in MESSAGE_FIELDS.items():
            if old in entry:
                mapping = options.setdefault("message_property_mappings", {})
                mapping[new] = entry.pop(old)
        if isinstance(kind, dict):
            kind, options = "user_defined.default", {k: v for k, v in kind.items() if v is not None}
        kind = "chat_template.default" if kind == "chat_template" else kind
        for name in ("chat_template", "chat_template_jinja"):  # per data set in axolotl, per run in megarl
            if name in entry and reading.unread.setdefault(name, entry[name]) == entry[name]:
                entry.pop(name)
        entry.pop("ds_type", None)  # the file's suffix decides
        name, split = entry.pop("name", ""), entry.pop("split", "train")
        for unknown, value in entry.items():
            reading.refuse(f"{where}.{unknown}", value, "is not supported in a data set")
        paths = [files] if isinstance(files, str) else files or [path]
        if files and path and Path(path).is_dir():
            paths = [str(Path(path) / file) for file in paths]
        elif files and path not in ("", "json", "parquet"):
            reading.refuse(f"{where}.data_files", files, "files of a hub data set cannot be picked; give local files")
        entry_sources = [SourceConfig(p, name, split, kind, options) for p in paths]
        try:
            if ALGORITHMS[rl][0] == "preference":
                format_of(entry_sources[0], paired=rl != "kto")
            elif options or "." not in kind:
                reading.refuse(f"{where}.type", kind, "must be FILE.FUNCTION, a transform, and takes no field names")
        except UserError as error:
            reading.refuse(f"{where}.type", kind, str(error))
        reading.note(where, path or files, f"type {kind}" + (f", options {plain(options)}" if options else ""))
        sources += entry_sources
    return sources


def _is_well_typed(reading: Reading, where: str, entry: dict[str, Any]) -> bool:
    """True if the keys of a data set have values of their types. Refuses the others."""
    bad = [(key, rule) for key, (fits, rule) in SOURCE_TYPES.items() if key in entry and not fits(entry[key])]
    for key, rule in bad:
        reading.refuse(f"{where}.{key}", entry[key], rule)
    return not bad


def _lengths_and_batch(reading: Reading, rl: str, replicas: int, train: list[SourceConfig]) -> None:
    """Sets lengths, batch size and steps, which depend on each other."""
    micro, accumulated = reading.whole("micro_batch_size", 1, 1), reading.whole("gradient_accumulation_steps", 1, 1)
    world = replicas * reading.whole("dp_shard_size", 1, 1) * reading.whole("dp_replicate_size", 1, 1)
    if world != replicas:
        reading.overrides["parallel.dp_size"] = world
        reading.note("dp_shard_size, dp_replicate_size", None, f"parallel.dp_size={world}")
    length = reading.whole("sequence_len", 512, 1)
    rows, samples, longest = micro * accumulated * world, 1, length
    if ALGORITHMS[rl][0] == "rl":
        completion = reading.whole("trl.max_completion_length", 256, 1)
        reading.set("trl.max_completion_length", completion, "gconfig.max_new_tokens", completion)
        if reading.overrides["algorithm"] == "dr_grpo":
            reading.overrides["algorithm.aggregate_tokens"] = completion
        length = reading.whole("max_prompt_len", 512, 1)
        samples, longest = reading.unread.get("trl.num_generations", 8), length + completion
        reading.unread["trl.num_generations"] = samples
        rows = reading.whole("trl.generation_batch_size", rows, 1)
        if type(samples) is not int or samples < 1 or rows % samples:
            reading.refuse(
                "micro_batch_size", micro, f"x gradient_accumulation_steps {accumulated} x {world} ranks = {rows} "
                f"completions is not a multiple of trl.num_generations={plain(samples)}",
            )  # fmt: skip
            samples = 1
        temperature = reading.number("trl.temperature", 1.0)
        reading.set("trl.temperature", temperature, "gconfig.temperature", temperature)
        reading.overrides["actor.temperature"] = temperature
    key = "max_prompt_len" if rl in ("grpo", "gdpo") else "sequence_len"
    for name in ("train_dataset", "valid_dataset"):
        reading.overrides[f"{name}.max_length"] = length
        reading.origins[f"{name}.max_length"] = Origin(key)
    reading.origins["actor.max_tokens_per_mb"] = Origin(f"micro_batch_size x {key}", same=False)
    reading.note(key, length, f"train_dataset.max_length={length}")
    sequences_per_row = 2 if ALGORITHMS[rl][0] == "preference" and rl != "kto" else 1
    note = f"{rows} a step with dp {world}" + (f" / {samples} samples" if samples > 1 else "")
    reading.set(
        "micro_batch_size x gradient_accumulation_steps",
        [micro, accumulated],
        "train_dataset.batch_size",
        rows // samples,
        note,
    )
    reading.overrides["actor.max_tokens_per_mb"] = micro * sequences_per_row * longest
    _steps(reading, max(rows // samples, 1), train)


def _steps(reading: Reading, batch: int, train: list[SourceConfig]) -> None:
    """Sets the steps of the run and the knobs that count in steps."""
    epochs, max_steps = reading.number("num_epochs", 1.0), reading.whole("max_steps", -1, -1)
    per_epoch = 0
    if max_steps < 1 or any(f"{name}_per_epoch" in reading.unread for name in ("saves", "evals")):
        if reading.refused:
            return  # read the data only if everything else is valid
        size = sum(len(load_rows(source.path, source.split, source.name)) for source in train)
        per_epoch = max(size // batch, 1)
    total = max_steps if max_steps > 0 else max(int(epochs * per_epoch), 1)
    note = "" if max_steps > 0 else f"{epochs:g} x {per_epoch} batches"
    key, stated = ("max_steps", max_steps) if max_steps > 0 else ("num_epochs", epochs)
    reading.set(key, stated, "total_train_steps", total, note)
    share, steps = reading.optional_number("warmup_ratio"), reading.optional_number("warmup_steps")
    key, value = ("warmup_steps", steps) if share is None else ("warmup_ratio", share)
    reading.set(key, value, "actor.optimizer.warmup_steps", _warmup(reading, steps, share, total))
    for name, knob in (("save", "saver.every_steps"), ("eval", "evaluator.every_steps")):
        every, times = reading.optional_number(f"{name}_steps"), reading.optional_number(f"{name}s_per_epoch")
        if every is not None:
            reading.set(f"{name}_steps", every, knob, _steps_of(reading, f"{name}_steps", every, total) or 1)
        elif times is not None:
            between = max(1, int(min(per_epoch / times, MAX_COUNT))) if times else 0
            reading.set(f"{name}s_per_epoch", times, knob, between)
        elif reading.unread.get(f"{name}_strategy") == "epoch":
            reading.set(reading.take(f"{name}_strategy") and f"{name}_strategy", "epoch", knob, per_epoch or total)


def _warmup(reading: Reading, steps: float | None, share: float | None, total: int) -> int:
    """Steps of the warm-up: stated, as a share of all steps, or transformers' default."""
    if steps is not None:
        return _steps_of(reading, "warmup_steps", steps, total)
    return min(int(0.03 * total), 100) if share is None else int(share * total)


def _steps_of(reading: Reading, key: str, value: float, total: int) -> int:
    """A number of steps; below 1 it is a share of all steps, as transformers reads it."""
    if value >= 1 and value != int(value):
        reading.refuse(key, value, "must be a whole number, or a share of all steps below 1")
    return int(value * total) if value < 1 else int(value)


def _numerics(reading: Reading) -> None:
    """Sets dtypes and the chat template, and fills in defaults of the logger and the learning-rate schedule."""
    bf16 = reading.take("bf16", reading.take("bfloat16"))
    if bf16 is not None and bf16 not in (True, False, "auto"):
        reading.refuse("bf16", bf16, "must be true, false or auto")
    dtype = "bfloat16" if bf16 is True or (bf16 == "auto" and takes_gpu_options()) else "float32"
    reading.set("bf16", bf16, "actor.dtype", dtype)
    if reading.unread.get("vllm.dtype", "auto") == "auto":
        reading.overrides["server.dtype"] = dtype
    reading.unread.setdefault("lr_scheduler", "cosine")  # axolotl's default
    if "wandb_project" in reading.unread:
        reading.unread.setdefault("use_wandb", True)
    if (tokenizer := reading.take("tokenizer_config")) not in (None, reading.unread.get("base_model")):
        reading.refuse("tokenizer_config", tokenizer, "the tokenizer is the checkpoint's; save it there")
    jinja, chat = reading.take("chat_template_jinja"), reading.take("chat_template")
    chat = jinja if jinja is not None and chat in (None, "jinja") else chat
    if chat in (None, "tokenizer_default"):
        return
    if jinja is None and chat not in ("chatml", "llama3"):
        reading.refuse("chat_template", chat, "is not tokenizer_default, chatml, llama3 or jinja; give its Jinja text")
        return
    reading.set("chat_template" if jinja is None else "chat_template_jinja", chat, "data.chat_template", chat)
