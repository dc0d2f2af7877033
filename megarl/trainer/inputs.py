"""Reads a run's tokenizer and data, and checks the run, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from megarl.actor.trait_checks import trained_model
from megarl.algorithms import OPDConfig, RewardModelConfig, algorithm_of
from megarl.checks import kernel_checks, length_checks, machine_checks, model_checks, server_checks
from megarl.config import Config
from megarl.data.collate import Batches, StreamBatches, batches_of, pad_sequences_to_tensors
from megarl.data.curriculum import Curriculum
from megarl.data.decontaminate import decontaminated
from megarl.data.examples import get_preference_dataset, pack_judged, pack_preferences, with_mismatched
from megarl.data.mixture import Origins, column_sets
from megarl.data.prompts import get_rl_dataset
from megarl.data.sft import get_sft_dataset
from megarl.data.templates import set_chat_template
from megarl.data.tokenizer import check_vocabulary
from megarl.families import as_scalar, read_config
from megarl.hub import local_folder
from megarl.knobs import UserError, run_all
from megarl.observe.run_folder import open_run
from megarl.rewards import check_columns
from megarl.rollout.workflows.distil import hint_columns
from megarl.teacher_checks import check_teacher_model, check_tokenizers, check_top_k
from megarl.trainer.checkpoints.saver import check_resumable
from megarl.types import PackedBatch


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run. With method=rl only rank 0 reads data; else every rank does."""

    model: PretrainedConfig
    tokenizer: Any
    train: Batches | StreamBatches | Curriculum | None = None
    valid: Any = None  # a datasets.Dataset
    rows: Any = None  # method=preference: the data set behind `train`
    pack: Callable[[Sequence[Any]], PackedBatch] = pack_preferences  # method=preference: makes a batch of rows
    teacher: PretrainedConfig | None = None  # model of a teacher that the run knows

    @property
    def vocab_size(self) -> int:
        """Token ids that the model and its teacher can read."""
        return min(model.vocab_size for model in (self.model, self.teacher) if model is not None)


def read_inputs(config: Config, rank: int) -> Inputs:
    """Reads and checks all inputs of a run.

    Raises:
        UserError: the model, layout, tokenizer or data cannot be used.
    """
    run_all(machine_checks(config))
    model = trained_model(config.actor, read_config(config.actor.path))
    if config.resume:
        scores = isinstance(config.algorithm, RewardModelConfig)
        trained = as_scalar(model) if scores else model
        check_resumable(open_run(config.resume).path, trained, config.actor)
    run_all([*model_checks(config, model), *kernel_checks(config, model)])
    tokenizer = load_tokenizer(config.actor.path)
    set_chat_template(tokenizer, config.data.chat_template)
    check_vocabulary(tokenizer, model.vocab_size, config.actor.path)
    teacher = _read_teacher(config, model, tokenizer)
    if config.method == "rl" and rank != 0:
        return Inputs(model, tokenizer, teacher=teacher)
    run_all(length_checks(config, model))
    if config.method == "sft":
        examples, held_out = (
            get_sft_dataset(data, tokenizer, config.data.on_bad_row)
            for data in (config.train_dataset, config.valid_dataset)
        )
        examples = decontaminated(examples, held_out, tokenizer, config.data)
        train = batches_of(examples, config.train_dataset, pad_sequences_to_tensors)
        return Inputs(model, tokenizer, train, held_out, teacher=teacher)
    if config.method == "preference":
        return _preferences(config, model, tokenizer)
    run_all(server_checks(config, local_folder(config.actor.path)))
    prompts, held_out = (
        get_rl_dataset(data, tokenizer, config.data.on_bad_row) for data in (config.train_dataset, config.valid_dataset)
    )
    if config.rollout.workflow != "environment" or not config.rollout.environment.gives_rewards:
        run_all([partial(_check_rewards, config.rewards.functions, rows) for rows in (prompts, held_out)])
    _check_hint(config.teacher.hint, prompts)
    prompts = decontaminated(prompts, held_out, tokenizer, config.data)
    return Inputs(model, tokenizer, _prompt_batches(config, prompts), held_out, teacher=teacher)


def _check_hint(hint: str, prompts: Any) -> None:
    """Refuses a teacher's hint that names a column which a source lacks."""
    for label, columns in column_sets(prompts).items():
        if missing := sorted(hint_columns(hint) - {*columns, "prompt_id"}):
            whose = f"source {label}" if label else "prompts"
            raise UserError(
                f"teacher.hint names the column {missing[0]}, which {whose} lack, with {', '.join(sorted(columns))}"
            )


def _check_rewards(functions: Sequence[str], rows: Any) -> None:
    """Refuses reward functions that cannot be called with the columns of each source."""
    for label, columns in column_sets(rows).items():
        try:
            run_all([partial(check_columns, name, {*columns, "prompt_id"}) for name in functions])
        except UserError as error:
            raise UserError(f"source {label}: {error}" if label else str(error)) from error


def _prompt_batches(config: Config, prompts: Any) -> Batches | StreamBatches | Curriculum:
    """The prompts of method=rl, without those that the curriculum leaves out."""
    if config.curriculum.skip == "off":
        return batches_of(prompts, config.train_dataset)
    numbered = Origins(prompts)
    batches = Batches(numbered, config.train_dataset)
    return Curriculum(config.curriculum, batches, numbered.distinct, config.evaluator.correct_reward)


def _preferences(config: Config, model: PretrainedConfig, tokenizer: Any) -> Inputs:
    algorithm = algorithm_of(config.algorithm)
    paired = algorithm.paired
    if config.train_dataset.stream:
        _check_streamed_preferences(config, algorithm)
    rows, held_out = (
        get_preference_dataset(data, tokenizer, paired, config.data.on_bad_row)
        for data in (config.train_dataset, config.valid_dataset)
    )
    rows = decontaminated(rows, held_out, tokenizer, config.data)
    pack: Callable[[Sequence[Any]], PackedBatch] = pack_preferences
    if not paired:
        rows, held_out = with_mismatched(rows), with_mismatched(held_out)
        pack = partial(pack_judged, max_length=config.train_dataset.max_length)
    return Inputs(model, tokenizer, batches_of(rows, config.train_dataset, pack), held_out, rows, pack)


def _check_streamed_preferences(config: Config, algorithm: Any) -> None:
    """Refuses a stream where a method goes over all rows before the first step."""
    if not algorithm.paired:
        raise UserError(
            f"train_dataset.stream=true: {type(algorithm).__name__} pairs each completion with one half a data set "
            "away, which a stream has no length for; set it to false"
        )
    if algorithm.needs_reference and config.reference.mode == "precompute":
        raise UserError(
            "train_dataset.stream=true: reference.mode=precompute goes over all rows before the first step, and a "
            "stream has no end; set reference.mode=online"
        )


def _read_teacher(config: Config, model: PretrainedConfig, tokenizer: Any) -> PretrainedConfig | None:
    """Reads and checks the teacher's config and tokenizer; None without a checkpoint."""
    if not isinstance(config.algorithm, OPDConfig) or not config.teacher.path:
        if isinstance(config.algorithm, OPDConfig) and config.algorithm.divergence == "top_k":
            check_top_k(config.algorithm.top_k, model.vocab_size)
        return None
    try:
        teacher = read_config(config.teacher.path)
    except UserError as error:
        raise UserError(str(error).replace("actor.path=", "teacher.path=")) from error
    check_teacher_model(config, model, teacher)
    own = load_tokenizer(config.teacher.path, "teacher.path")
    check_vocabulary(own, teacher.vocab_size, config.teacher.path)
    check_tokenizers(tokenizer, own, config.teacher.path)
    return teacher


def load_tokenizer(path: str, knob: str = "actor.path") -> Any:
    """Loads the tokenizer of a checkpoint folder or hub name, which `knob` gives.

    Raises:
        UserError: the folder has none, or it cannot be read.
    """
    folder = local_folder(path)
    if not any(folder.glob("tokenizer*")):  # transformers would invent an empty one
        raise UserError(f"{knob}={path} holds no tokenizer; save the model's own there with save_pretrained")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"{knob}={path} has no readable tokenizer ({first}); save one there") from error
