"""Tokenizes preferences into examples and packed batches, for DPO, KTO and the other offline methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from datasets import Features, List, Value, concatenate_datasets

from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.mixture import Mixture, read_sources
from megarl.data.preference import COMPLETION, PAIR, Format, Options, format_of
from megarl.data.prepare import (
    BadRow,
    Row,
    convert_rows,
    keep_within,
    lengths_of,
    parsed,
    tokenizer_identity,
)
from megarl.data.sources import load_rows
from megarl.data.stream import Conversion, RowStream
from megarl.data.templates import (
    Message,
    Turns,
    answer_text,
    begins_with_bos,
    need_chat_template,
    rendered,
    split_ids,
    stop_ids,
)
from megarl.knobs import UserError
from megarl.types import PackedBatch, cu_seqlens_of


@dataclass(frozen=True)
class PreferenceExample:
    """A pair as token ids. `row_id` identifies its row across epochs and mixtures."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    row_id: int


@dataclass(frozen=True)
class KTOExample:
    """A completion as token ids, with a label that is true if it is desirable."""

    prompt_ids: list[int]
    completion_ids: list[int]
    kto_label: bool
    row_id: int


def get_preference_dataset(
    config: DatasetConfig, tokenizer: Any, paired: bool = True, on_bad_row: str = "error"
) -> Any:
    """Reads a data set, or several mixed ones, as rows of `PreferenceExample` or, unless `paired`, `KTOExample`.

    A row's length is its prompt with the longer completion. Rows over `max_length` tokens are skipped with a warning
    that lists them.

    Raises:
        UserError: a type or option is unknown, data cannot be read, or rows do not fit.
    """

    def read(number: int, source: SourceConfig) -> Any:
        format_, options = format_of(source, paired)
        if format_.write is None:
            need_chat_template(tokenizer, source.type)
        write = Writer(tokenizer, format_, options)

        def convert(index: int, values: dict[str, Any]) -> dict[str, Any]:
            row = Row(parsed(values))
            ids = [index + number * 2**40]
            prompt, answers = write(*format_.read(row, options))
            if paired:
                return asdict(PreferenceExample(prompt, answers[0], answers[1], *ids))
            return asdict(KTOExample(prompt, answers[0], _label(row, options.get("field_label", "label")), *ids))

        what = "pairs" if paired else "completions"
        if config.stream:
            return RowStream(source, config, Conversion(convert, _length, what), on_bad_row)
        rows = load_rows(source.path, source.split, source.name)
        identity = ["preference", paired, number, tokenizer_identity(tokenizer)]
        done = convert_rows(rows, convert, FEATURES[paired], identity, source, on_bad_row)
        return keep_within(done, _lengths(done), config.max_length, what)

    return read_sources(config, read)


IDS = List(Value("int32"))
FEATURES = {
    True: Features({"prompt_ids": IDS, "chosen_ids": IDS, "rejected_ids": IDS, "row_id": Value("int64")}),
    False: Features({"prompt_ids": IDS, "completion_ids": IDS, "kto_label": Value("bool"), "row_id": Value("int64")}),
}


class Writer:
    """Tokenizes a draft: the prompt, and each of its answers."""

    def __init__(self, tokenizer: Any, format_: Format, options: Options):
        self.tokenizer, self.write, self.options = tokenizer, format_.write, options
        self.stops = stop_ids(tokenizer)
        # The tokenizer's chat template writes its own bos. Before any other prompt, add one if the tokenizer would.
        self.bos = [tokenizer.bos_token_id] if self.write is not None and begins_with_bos(tokenizer) else []

    def __call__(self, chat: list[Message], answers: list[str]) -> tuple[list[int], list[list[int]]]:
        prompt, completions = self.texts(chat, answers)
        split = [split_ids(self.tokenizer, prompt, completion) for completion in completions]
        prompt_ids = split[0][0]
        if prompt_ids[: len(self.bos)] != self.bos:
            prompt_ids = self.bos + prompt_ids
        if not prompt_ids:
            raise BadRow("the prompt", "", "expected at least one token before a completion")
        return prompt_ids, [self._ended(ids) for _, ids in split]

    def texts(self, chat: list[Message], answers: list[str]) -> tuple[str, list[str]]:
        """Writes the prompt and the completions as text."""
        if isinstance(self.write, Turns):
            return self.write.prompt(chat), [answer + self.write.answer_end for answer in answers]
        if self.write is None:
            prompt = rendered(self.tokenizer, chat, cue=True)
            return prompt, [answer_text(self.tokenizer, chat, prompt, answer) for answer in answers]
        contents = {message["role"]: message["content"] for message in chat}
        names = PAIR if len(answers) == 2 else (COMPLETION,)
        prompt = self.options["prompt_format"].format(prompt=contents["user"], system=contents.get("system", ""))
        return prompt, [
            self.options[f"{name}_format"].format(**{name: answer}) for name, answer in zip(names, answers, strict=True)
        ]

    def _ended(self, ids: list[int]) -> list[int]:
        """Appends the eos token, unless the completion already ends in a special token."""
        if ids and ids[-1] in self.stops:
            return ids
        if self.tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no eos token, so no completion has an end; set tokenizer.eos_token")
        return [*ids, self.tokenizer.eos_token_id]


def _label(row: Row, field: str) -> bool:
    """Reads a label: true or false, 1 or 0, or one of these as text. True if the completion is desirable."""
    value = row.values.get(field)
    text = str(value).strip().lower()
    if text not in ("true", "false", "1", "0", "1.0", "0.0"):
        raise BadRow(field, value, "expected true or false")
    return text in ("true", "1", "1.0")


def _length(row: Mapping[str, Any]) -> int:
    """Returns the number of tokens of a row's prompt and longest completion."""
    prompt, *answers = (len(value) for name, value in row.items() if name.endswith("_ids"))
    return prompt + max(answers)


def _lengths(dataset: Any) -> list[int]:
    """Returns the number of tokens of each row's prompt and longest completion."""
    prompts, *answers = (lengths_of(dataset, name) for name in dataset.column_names if name.endswith("_ids"))
    return [prompt + max(lengths) for prompt, *lengths in zip(prompts, *answers, strict=True)]


def pack_preferences(rows: Sequence[dict[str, Any]]) -> PackedBatch:
    """Packs rows of `PreferenceExample` or `KTOExample`. A `collate_fn` for `Batches`.

    The sequences are chosen_0, rejected_0, chosen_1, ... for pairs, and one per row for KTO. Per token: `input_ids`
    int64 and `loss_mask` bool, true on the completion. Per sequence: `row_ids` int64. Pairs add `pair_ids` int64
    (0, 0, 1, 1, ...) and `is_chosen` bool; KTO adds `kto_label` bool.
    """
    paired = "chosen_ids" in rows[0]
    names = ("chosen_ids", "rejected_ids") if paired else ("completion_ids",)
    parts = [(row["prompt_ids"], row[name]) for row in rows for name in names]
    row_ids = torch.tensor([row["row_id"] for row in rows]).repeat_interleave(len(names))
    sequences = {"row_ids": row_ids}
    if paired:
        sequences["pair_ids"] = torch.arange(len(rows)).repeat_interleave(2)
        sequences["is_chosen"] = torch.tensor([True, False]).repeat(len(rows))
    else:
        sequences["kto_label"] = torch.tensor([bool(row["kto_label"]) for row in rows])
    tokens = {
        "input_ids": torch.tensor([token for prompt, answer in parts for token in (*prompt, *answer)]),
        "loss_mask": torch.tensor([flag for p, a in parts for flag in [False] * len(p) + [True] * len(a)]),
    }
    return PackedBatch(cu_seqlens_of(torch.tensor([len(p) + len(a) for p, a in parts])), tokens, sequences)


def with_mismatched(dataset: Any) -> Any:
    """Adds `mismatched_ids` to KTO rows: the completion of the row half a data set away.

    Rows of one prompt are usually adjacent, so a neighbour's completion would often answer the same prompt.
    """
    if isinstance(dataset, Mixture):
        return dataset.with_parts([with_mismatched(part) for part in dataset.parts])
    size = len(dataset)
    others = dataset.select([(i + size // 2) % size for i in range(size)]).select_columns(["completion_ids"])
    others = others.rename_column("completion_ids", "mismatched_ids")
    return concatenate_datasets([dataset, others], axis=1)


def pack_judged(rows: Sequence[dict[str, Any]], max_length: int | None = None) -> PackedBatch:
    """Packs rows of `with_mismatched` as own_0, mismatched_0, own_1, mismatched_1, ...

    Each prompt comes with its own completion and then with the mismatched one. The latter is cut to `max_length` tokens
    with its prompt, but keeps at least one. The batch is as in `pack_preferences`, with `kto_label` and `mismatched`
    bool `[num_seqs]` in place of `pair_ids` and `is_chosen`.
    """
    pairs = []
    for row in rows:
        limit = len(row["mismatched_ids"]) if max_length is None else max(max_length - len(row["prompt_ids"]), 1)
        answers = {"chosen_ids": row["completion_ids"], "rejected_ids": row["mismatched_ids"][:limit]}
        pairs.append({"prompt_ids": row["prompt_ids"], **answers, "row_id": row["row_id"]})
    batch = pack_preferences(pairs)
    sequences = {
        "row_ids": batch["row_ids"],
        "kto_label": torch.tensor([bool(row["kto_label"]) for row in rows]).repeat_interleave(2),
        "mismatched": ~batch["is_chosen"],
    }
    return PackedBatch(batch.cu_seqlens, batch.tokens, sequences)
