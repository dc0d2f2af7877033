"""Reads a run's tokenizer and data, and checks the run, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from megarl.algorithms import RewardModelConfig, algorithm_of
from megarl.checks import length_checks, machine_checks, model_checks, server_checks
from megarl.config import Config
from megarl.data.collate import Batches, pad_sequences_to_tensors
from megarl.data.examples import get_preference_dataset, pack_judged, pack_preferences, with_mismatched
from megarl.data.prompts import get_rl_dataset
from megarl.data.sft import get_sft_dataset
from megarl.data.templates import set_chat_template
from megarl.data.tokenizer import check_vocabulary
from megarl.families import as_scalar, read_config
from megarl.hub import local_folder
from megarl.knobs import UserError, run_all
from megarl.observe.run_folder import open_run
from megarl.rewards import check_columns
from megarl.trainer.checkpoints.saver import check_resumable
from megarl.types import PackedBatch


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run. With method=rl only rank 0 reads data; else every rank does."""

    model: PretrainedConfig
    tokenizer: Any
    train: Batches | None = None
    valid: Any = None  # a datasets.Dataset
    rows: Any = None  # method=preference: the data set behind `train`
    pack: Callable[[Sequence[Any]], PackedBatch] = pack_preferences  # method=preference: makes a batch of rows


def read_inputs(config: Config, rank: int) -> Inputs:
    """Reads and checks all inputs of a run.

    Raises:
        UserError: the model, layout, tokenizer or data cannot be used.
    """
    run_all(machine_checks(config))
    model = read_config(config.actor.path)
    if config.resume:
        scores = isinstance(config.algorithm, RewardModelConfig)
        trained = as_scalar(model) if scores else model
        check_resumable(open_run(config.resume).path, trained, config.actor.dtype)
    run_all(model_checks(config, model))
    tokenizer = load_tokenizer(config.actor.path)
    set_chat_template(tokenizer, config.data.chat_template)
    check_vocabulary(tokenizer, model.vocab_size, config.actor.path)
    if config.method == "rl" and rank != 0:
        return Inputs(model, tokenizer)
    run_all(length_checks(config, model))
    if config.method == "sft":
        examples, held_out = (
            get_sft_dataset(data, tokenizer, config.data.on_bad_row)
            for data in (config.train_dataset, config.valid_dataset)
        )
        train = Batches(examples, config.train_dataset, pad_sequences_to_tensors)
        return Inputs(model, tokenizer, train, held_out)
    if config.method == "preference":
        return _preferences(config, model, tokenizer)
    run_all(server_checks(config, local_folder(config.actor.path)))
    prompts, held_out = (
        get_rl_dataset(data, tokenizer, config.data.on_bad_row) for data in (config.train_dataset, config.valid_dataset)
    )
    columns = {*prompts.column_names, "prompt_id"}
    run_all([partial(check_columns, name, columns) for name in config.rewards.functions])
    return Inputs(model, tokenizer, Batches(prompts, config.train_dataset), held_out)


def _preferences(config: Config, model: PretrainedConfig, tokenizer: Any) -> Inputs:
    paired = algorithm_of(config.algorithm).paired
    rows, held_out = (
        get_preference_dataset(data, tokenizer, paired, config.data.on_bad_row)
        for data in (config.train_dataset, config.valid_dataset)
    )
    pack: Callable[[Sequence[Any]], PackedBatch] = pack_preferences
    if not paired:
        rows, held_out = with_mismatched(rows), with_mismatched(held_out)
        pack = partial(pack_judged, max_length=config.train_dataset.max_length)
    return Inputs(model, tokenizer, Batches(rows, config.train_dataset, pack), held_out, rows, pack)


def load_tokenizer(path: str) -> Any:
    """Loads the tokenizer of a checkpoint folder or hub name.

    Raises:
        UserError: the folder has none, or it cannot be read.
    """
    folder = local_folder(path)
    if not any(folder.glob("tokenizer*")):  # transformers would invent an empty one
        raise UserError(f"actor.path={path} holds no tokenizer; save the model's own there with save_pretrained")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"actor.path={path} has no readable tokenizer ({first}); save one there") from error
