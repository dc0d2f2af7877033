"""Reads prompts for RL: GSM8K and data in its layout, rows with `messages`, and rows made by a user's function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from datasets import Dataset, Features, List, Value
from datasets.distributed import split_dataset_by_node
from tqdm import tqdm

from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.mixture import read_sources
from megarl.data.prepare import (
    BAR_FROM_ROWS,
    FIELDS,
    ROLES,
    BadRow,
    Row,
    cached_map,
    keep_within,
    logger,
    parsed,
    report,
    tokenizer_identity,
)
from megarl.data.sources import load_rows, load_table
from megarl.data.stream import Conversion, RowStream
from megarl.data.templates import prompt_ids
from megarl.knobs import UserError, function_of, shown

__all__ = [
    "DatasetConfig",
    "get_gsm8k_rl_dataset",
    "get_rl_dataset",
    "load_gsm8k",
    "prompt_ids",
    "split_dataset_by_node",
]

COLUMNS = ("question", "answer")
REWARD_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")
MARKED = re.compile(r"####\s*[^\s#]")  # before the answer's number
MESSAGES = List({"role": Value("string"), "content": Value("string")})


def get_rl_dataset(config: DatasetConfig, tokenizer: Any, on_bad_row: str = "error") -> Any:
    """Reads the prompts of a data set, or of several mixed ones: `messages` and the columns for the reward function.

    The type is `gsm8k`, `messages` (rows have them already), or `FILE.FUNCTION`. The last is the user's function
    `f(cfg)` that returns `(transform_fn, {"remove_columns": [...]})`, as in axolotl's GRPO.

    Raises:
        UserError: the data cannot be read or used, or rows do not fit.
    """

    def read(number: int, source: SourceConfig) -> Any:
        if config.stream:
            convert = _gsm8k_row(config.instruction) if source.type == "gsm8k" else _row_of(source, config, tokenizer)
            conversion = Conversion(convert, lambda row: len(prompt_ids(tokenizer, row["messages"])), "prompts")
            return RowStream(source, config, conversion, on_bad_row)
        if source.type == "gsm8k":
            return get_gsm8k_rl_dataset(
                source.path, source.split, tokenizer, config.max_length, source.name, config.instruction
            )
        return _transformed(source, config, tokenizer, on_bad_row)

    return read_sources(config, read)


def _gsm8k_row(instruction: str) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Makes the function that converts a row of a stream with `question` and `answer`."""

    def convert(index: int, values: dict[str, Any]) -> dict[str, Any]:
        row = Row(parsed(values))
        if not MARKED.search(row.text("answer")):
            raise BadRow("answer", row.text("answer")[-60:], "expected '#### N' in it, the number to compare with")
        columns = {k: v for k, v in row.values.items() if k not in ("question", *REWARD_ARGUMENTS)}
        return {**columns, "messages": [{"role": "user", "content": row.text("question") + instruction}]}

    return convert


def load_gsm8k(path: str, split: str, name: str = "main") -> Dataset:
    """Loads the rows of `split` and checks that they have the text columns `question` and `answer`.

    `path` is as in `load_table`.

    Raises:
        UserError: the data is not found, cannot be read, is empty or lacks these columns.
    """
    dataset = load_table(path, split, name)
    _check_columns(dataset, path)
    return dataset


def get_gsm8k_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, name: str = "main", instruction: str = ""
) -> Dataset:
    r"""Reads prompts for RL: `messages` (one user turn: the question and `instruction`), `answer`, other columns.

    Prompts of more than `max_length` tokens, chat template included, are dropped with a warning that lists them.
    `instruction` is appended to each question, such as `"\nPut your final answer within \\boxed{}."`.

    Raises:
        UserError: the data cannot be read or used, an answer lacks `#### N`, or every prompt is too long.
    """
    dataset = load_gsm8k(path, split, name)
    unmarked = [i for i, answer in enumerate(dataset["answer"]) if not MARKED.search(answer)]
    if unmarked:
        raise UserError(
            f"{len(unmarked)} of {len(dataset)} answers of {path} ({split}) lack '#### N', the first is "
            f"row {unmarked[0]}: {dataset[unmarked[0]]['answer'][-60:]!r}; rewards compare with the number after '####'"
        )
    clashing = [c for c in dataset.column_names if c in REWARD_ARGUMENTS]
    if clashing:
        logger.warning("columns %s are left out: reward functions have arguments of these names", clashing)
    columns = [c for c in dataset.column_names if c not in ("question", *clashing)]

    def to_messages(row: dict[str, Any], index: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": row["question"] + instruction}]
        return {**{column: row[column] for column in columns}, "messages": messages}

    features = Features({**{column: dataset.features[column] for column in columns}, "messages": MESSAGES})
    dataset = cached_map(dataset, to_messages, features, ["gsm8k prompts", instruction, columns], "preparing data")
    if max_length is None:
        return dataset

    def measure(row: dict[str, Any], index: int) -> dict[str, int]:
        return {"length": len(prompt_ids(tokenizer, row["messages"]))}

    key = ["prompt lengths without thinking", tokenizer_identity(tokenizer)]
    lengths = cached_map(dataset, measure, Features({"length": Value("int32")}), key, "measuring prompts")
    return keep_within(dataset, list(lengths["length"]), max_length, "prompts")


def _transformed(source: SourceConfig, config: DatasetConfig, tokenizer: Any, on_bad_row: str) -> list[dict[str, Any]]:
    """Reads rows through the user's function, or unchanged for the type `messages`.

    The rows are not cached, as the function may depend on anything.
    """
    convert = _row_of(source, config, tokenizer)
    rows = load_rows(source.path, source.split, source.name)
    prompts, lengths, bad = [], [], []
    for index, values in enumerate(tqdm(rows, "preparing data", disable=len(rows) < BAR_FROM_ROWS)):
        try:
            prompts.append(convert(index, values))
        except BadRow as error:
            bad.append((index, str(error)))
            continue
        lengths.append(len(prompt_ids(tokenizer, prompts[-1]["messages"])))
    if bad:
        report(bad, len(rows), source, on_bad_row)
    return keep_within(prompts, lengths, config.max_length, "prompts")


def _row_of(
    source: SourceConfig, config: DatasetConfig, tokenizer: Any
) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Makes the function that converts a row by the user's transform."""
    transform, removed = _transform_of(source, config)
    takes = inspect.signature(transform).parameters
    extra = {name: tokenizer for name in ("tokenizer", "processing_class") if name in takes}

    def convert(index: int, values: dict[str, Any]) -> dict[str, Any]:
        original = Row(parsed(values)).values
        transformed = Row(transform(dict(original), **extra)).values
        return _prompt_row({**{name: value for name, value in original.items() if name not in removed}, **transformed})

    return convert


def _prompt_row(row: dict[str, Any]) -> dict[str, Any]:
    """Moves `prompt` (messages or the user's text, as in TRL) or `messages` to `messages`. Other columns stay."""
    field = "prompt" if row.get("prompt") is not None else "messages"
    if isinstance(row.get(field), str):
        messages = [{"role": "user", "content": row[field]}]
    else:
        messages = Row(row).messages(field, FIELDS, ROLES)
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"{field}[{len(messages) - 1}].role", "assistant", "a prompt ends before the assistant's turn")
    return {**{k: v for k, v in row.items() if k not in ("messages", *REWARD_ARGUMENTS)}, "messages": messages}


def _transform_of(source: SourceConfig, config: DatasetConfig) -> tuple[Callable[..., Any], list[str]]:
    """Returns the function that transforms a row, and the columns to remove."""
    if source.type == "messages":
        return lambda example: example, []
    if "." not in source.type:
        raise UserError(
            f"type {source.type!r} of {shown(source.path)} is not gsm8k, messages or FILE.FUNCTION of your own"
        )
    result = function_of(source.type, f"type {source.type} of {shown(source.path)}")(
        {"datasets": [asdict(source)], "sequence_len": config.max_length}
    )
    transform, settings = result if isinstance(result, tuple) else (result, {})
    if not callable(transform) or not isinstance(settings, dict):
        raise UserError(f"{source.type}(cfg) gave {result!r}; it must give transform_fn, {{'remove_columns': [...]}}")
    return transform, list(settings.get("remove_columns", []))


def _check_columns(dataset: Dataset, path: str) -> None:
    missing = [c for c in COLUMNS if c not in dataset.column_names]
    if missing:
        raise UserError(f"data set {path} has no column {' and no '.join(missing)}; it has {dataset.column_names}")
    if len(dataset) == 0:
        raise UserError(f"data set {path} is empty: it has columns but no rows")
    for column in COLUMNS:
        dtype = getattr(dataset.features[column], "dtype", "a nested value")
        if dtype not in ("string", "large_string"):
            raise UserError(f"column {column} of {path} holds {dtype}, text is needed; convert it to strings")
        if column_nulls := dataset.data.column(column).null_count:
            raise UserError(f"column {column} of {path} is empty (null) in {column_nulls} rows; drop or fill them")
