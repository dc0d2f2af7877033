"""Tokenizes data for supervised fine-tuning, with a loss mask: GSM8K's questions and answers, chats, and samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Dataset, Features, List, Value

from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.mixture import read_sources
from megarl.data.prepare import (
    FIELDS,
    ROLES,
    BadRow,
    Row,
    cached_map,
    convert_rows,
    keep_within,
    lengths_of,
    parsed,
    tokenizer_identity,
)
from megarl.data.prompts import load_gsm8k
from megarl.data.sources import load_rows
from megarl.data.stream import Conversion, RowStream
from megarl.data.templates import chat_ids, need_chat_template, prompt_ids, split_ids
from megarl.knobs import UserError, shown

FEATURES = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("int8"))})
TYPES = ("gsm8k", "messages", "samples")


def get_sft_dataset(config: DatasetConfig, tokenizer: Any, on_bad_row: str = "error") -> Any:
    """Reads a data set, or several mixed ones, as rows of `input_ids` and `loss_mask`.

    The type is `gsm8k`, `messages` or `samples`. `messages` are chats of any number of turns, with loss on the
    assistant's messages only. `samples` are lines that an evaluation wrote, with loss on the completion.

    Raises:
        UserError: the data cannot be read or used, or rows do not fit.
    """

    def read(number: int, source: SourceConfig) -> Any:
        if source.type not in TYPES:
            known = ", ".join(TYPES)
            raise UserError(f"type {source.type!r} of {shown(source.path)} is not one of method=sft: {known}")
        if config.stream:
            convert = _converter(source.type, tokenizer, config.instruction)
            conversion = Conversion(convert, lambda row: len(row["input_ids"]), "sequences")
            return RowStream(source, config, conversion, on_bad_row)
        if source.type == "gsm8k":
            return get_gsm8k_sft_dataset(
                source.path, source.split, tokenizer, config.max_length, source.name, config.instruction
            )
        convert = _converter(source.type, tokenizer, config.instruction)
        rows = load_rows(source.path, source.split, source.name)
        key = [tokenizer_identity(tokenizer)]
        dataset = convert_rows(rows, convert, FEATURES, key, source, on_bad_row)
        return keep_within(dataset, lengths_of(dataset), config.max_length, "sequences")

    return read_sources(config, read)


def _converter(kind: str, tokenizer: Any, instruction: str) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Makes the function that converts a row of a type."""
    if kind == "gsm8k":
        return _gsm8k_row(tokenizer, instruction)
    return _chat_row(tokenizer) if kind == "messages" else _sample_row(tokenizer)


def _gsm8k_row(tokenizer: Any, instruction: str) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Makes the function that converts a row with `question` and `answer`."""
    _need_eos(tokenizer)

    def convert(index: int, values: dict[str, Any]) -> dict[str, Any]:
        row = Row(parsed(values))
        return question_and_answer(tokenizer, row.text("question") + instruction, row.text("answer"))

    return convert


def _chat_row(tokenizer: Any) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Makes the function that converts a row with `messages`."""
    need_chat_template(tokenizer, "messages")

    def convert(index: int, values: dict[str, Any]) -> dict[str, Any]:
        ids, mask = chat_ids(tokenizer, Row(parsed(values)).messages("messages", FIELDS, ROLES))
        return {"input_ids": ids, "loss_mask": mask}

    return convert


def _sample_row(tokenizer: Any) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Makes the function that converts a line of an evaluation. Its texts hold their special tokens."""

    def convert(index: int, values: dict[str, Any]) -> dict[str, Any]:
        row = Row(parsed(values))
        for field in ("turns", "segments"):
            if row.has(field):
                raise BadRow(field, row.values[field], "expected a sample of one prompt and one completion")
        prompt, completion = split_ids(tokenizer, row.text("prompt"), row.text("completion"))
        return {"input_ids": prompt + completion, "loss_mask": [0] * len(prompt) + [1] * len(completion)}

    return convert


def _need_eos(tokenizer: Any) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos token, so a model could not learn to stop; set tokenizer.eos_token")


def get_gsm8k_sft_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, name: str = "main", instruction: str = ""
) -> Dataset:
    """Reads rows of `input_ids` and `loss_mask` (0 on the prompt, 1 on the answer and its end-of-sequence token).

    The prompt is the same as in a rollout: through the tokenizer's chat template if it has one, else the bare question.
    No token spans prompt and answer. Sequences of more than `max_length` tokens are dropped with a warning that lists
    them.
    """
    _need_eos(tokenizer)
    dataset = load_gsm8k(path, split, name)

    def to_tokens(row: dict[str, Any], index: int) -> dict[str, list[int]]:
        return question_and_answer(tokenizer, row["question"] + instruction, row["answer"])

    key = ["gsm8k sequences without thinking", instruction, tokenizer_identity(tokenizer)]
    dataset = cached_map(dataset, to_tokens, FEATURES, key, "preparing data")
    return keep_within(dataset, lengths_of(dataset), max_length, "sequences")


def question_and_answer(tokenizer: Any, question: str, answer: str) -> dict[str, list[int]]:
    """Tokenizes a prompt, its answer and the eos token into `input_ids` and `loss_mask`."""
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": question}])
    if tokenizer.chat_template:
        answer_ids = tokenizer.encode(answer, add_special_tokens=False)
    else:
        answer_ids = split_ids(tokenizer, question, answer)[1]
    answer_ids.append(tokenizer.eos_token_id)
    return {"input_ids": prompt + answer_ids, "loss_mask": [0] * len(prompt) + [1] * len(answer_ids)}
