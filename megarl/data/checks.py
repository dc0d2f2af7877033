"""Rules between the knobs of data sets; `megarl/checks.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megarl.data.config import CurriculumConfig, DatasetConfig
from megarl.knobs import UserError


def data_checks(
    method: str, train: DatasetConfig, valid: DatasetConfig, curriculum: CurriculumConfig
) -> Sequence[Callable[[], object]]:
    """Checks of the data sets' knobs, alone and against each other."""
    return [
        partial(_named, "train_dataset", train),
        partial(_named, "valid_dataset", valid),
        partial(_check_stream, train, valid),
        partial(_check_curriculum, method, train, curriculum),
    ]


def _named(name: str, data: DatasetConfig) -> None:
    """Refuses sources that contradict each other, with the data set's name."""
    try:
        data.parts()
    except UserError as error:
        raise UserError(f"{name}.{error}") from error


def _check_stream(train: DatasetConfig, valid: DatasetConfig) -> None:
    if valid.stream:
        raise UserError(
            "valid_dataset.stream=true: an evaluation takes all held-out rows, and a stream has no end; set it to false"
        )
    if not train.stream:
        return
    if train.num_workers:
        raise UserError(
            f"train_dataset.num_workers={train.num_workers}: train_dataset.stream=true reads in the trainer, in one "
            "order; set num_workers to 0"
        )
    if len(train.sources) > 1 and not all(source.weight for source in train.sources):
        raise UserError(
            "train_dataset.stream=true mixes sources by their weights, as nobody knows their lengths; give each of "
            "train_dataset.sources a weight above 0"
        )


def _check_curriculum(method: str, train: DatasetConfig, curriculum: CurriculumConfig) -> None:
    if curriculum.skip == "off":
        return
    if method != "rl":
        raise UserError(
            f"curriculum.skip={curriculum.skip} goes by the rewards of completions, and method={method} samples none; "
            "set it to off"
        )
    if train.stream:
        raise UserError(
            f"curriculum.skip={curriculum.skip} keeps a measurement of every prompt, and train_dataset.stream=true "
            "has no number of prompts; set one of them to its default"
        )
