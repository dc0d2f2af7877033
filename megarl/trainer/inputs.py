"""What a run reads before anything is started: tokenizer and data, checked against the model and the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from megarl.actor.config import check_config as check_engine
from megarl.actor.config import check_device
from megarl.algorithms import RewardModelConfig, algorithm_of
from megarl.config import Config
from megarl.data.collate import Batches, pad_sequences_to_tensors
from megarl.data.config import DatasetConfig
from megarl.data.examples import get_preference_dataset, pack_judged, pack_preferences, with_mismatched
from megarl.data.prompts import get_rl_dataset
from megarl.data.sft import get_sft_dataset
from megarl.data.templates import set_chat_template
from megarl.data.tokenizer import check_vocabulary
from megarl.families import as_scalar, check_deterministic, check_layout, local_folder, read_config
from megarl.knobs import UserError
from megarl.observe.run_folder import open_run
from megarl.parallel import platform
from megarl.rollout.servers.sglang_server import check_config as check_server
from megarl.trainer.checkpoints.saver import check_resumable
from megarl.types import PackedBatch


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run. Of an RL run rank 0 alone reads data; of any other, every rank does."""

    model: PretrainedConfig
    tokenizer: Any
    train: Batches | None = None
    valid: Any = None  # a datasets.Dataset
    rows: Any = None  # method=preference: the data set behind `train`
    pack: Callable[[Sequence[Any]], PackedBatch] = pack_preferences  # method=preference: its rows as a batch


def read_inputs(config: Config, rank: int) -> Inputs:
    """Reads and checks everything that a run stands on.

    Raises:
        UserError: model, layout, tokenizer or data that cannot be used, in one line.
    """
    check_engine(config.actor)
    check_device(config.actor, platform.has_gpu(), platform.has_transformer_engine(), config.deterministic)
    model = read_config(config.actor.path)
    if config.resume:
        scores = isinstance(config.algorithm, RewardModelConfig)
        trained = as_scalar(model) if scores else model
        check_resumable(open_run(config.resume).path, trained, config.actor.dtype)
    check_layout(model, config.parallel)
    if config.deterministic:
        check_deterministic(model, config.parallel, config.actor.dtype)
    tokenizer = load_tokenizer(config.actor.path)
    set_chat_template(tokenizer, config.data.chat_template)
    check_vocabulary(tokenizer, model.vocab_size, config.actor.path)
    if config.method == "sft":
        examples, held_out = (
            get_sft_dataset(data, tokenizer, config.data.on_bad_row)
            for data in (config.train_dataset, config.valid_dataset)
        )
        train = Batches(examples, config.train_dataset, pad_sequences_to_tensors)
        return Inputs(model, tokenizer, train, held_out)
    if config.method == "preference":
        return _preferences(config, model, tokenizer)
    if rank != 0:
        return Inputs(model, tokenizer)
    _check_lengths("train_dataset", config.train_dataset, config, model)
    _check_lengths("valid_dataset", config.valid_dataset, config, model)
    check_server(config.server, local_folder(config.actor.path), config.sglang)
    prompts, held_out = (
        get_rl_dataset(data, tokenizer, config.data.on_bad_row) for data in (config.train_dataset, config.valid_dataset)
    )
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
    """The tokenizer of a checkpoint folder or hub name.

    Raises:
        UserError: there is none that can be read.
    """
    folder = local_folder(path)
    if not any(folder.glob("tokenizer*")):  # transformers would make up an empty one
        raise UserError(f"actor.path={path} holds no tokenizer; save the model's own there with save_pretrained")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"actor.path={path} has no readable tokenizer ({first}); save one there") from error


def _check_lengths(name: str, data: DatasetConfig, config: Config, model: PretrainedConfig) -> None:
    prompt, completion = data.max_length, config.gconfig.max_new_tokens
    if prompt is None:
        raise UserError(f"{name}.max_length is not set; give the longest prompt in tokens, longer ones are skipped")
    if prompt + completion > model.max_position_embeddings:
        raise UserError(
            f"{name}.max_length={prompt} + gconfig.max_new_tokens={completion} = {prompt + completion} exceeds "
            f"the model's max_position_embeddings={model.max_position_embeddings}; shorten one of them"
        )
