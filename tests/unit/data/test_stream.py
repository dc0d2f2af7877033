"""Streams give the rows of the data set in memory, resume at the next token, and say what they cannot do."""

import dataclasses
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from megarl.data.checks import data_checks
from megarl.data.collate import Batches, StreamBatches, batches_of, pad_sequences_to_tensors
from megarl.data.config import CurriculumConfig, DatasetConfig, SourceConfig
from megarl.data.examples import get_preference_dataset, pack_preferences
from megarl.data.mixture import column_sets
from megarl.data.prepare import BadRow, parsed
from megarl.data.prompts import get_rl_dataset
from megarl.data.sft import get_sft_dataset
from megarl.data.stream import Conversion, RowStream, StreamMixture
from megarl.knobs import UserError, run_all
from megarl.observe.metrics import stats_tracker
from megarl.types import ORIGIN
from tests import rows as table

pytestmark = table.marks()
ROWS = 90


def write_shards(folder: Path, rows: list[Any]) -> Path:
    """Writes shards: json lines with blank lines between, gzip, and the rest."""
    third = len(rows) // 3
    text = [
        "\n\n".join(map(json.dumps, rows[:third])),
        *("\n".join(map(json.dumps, part)) for part in (rows[third : 2 * third], rows[2 * third :])),
    ]
    (folder / "train-0.jsonl").write_text(text[0] + "\n")
    with gzip.open(folder / "train-1.jsonl.gz", "wt") as file:
        file.write(text[1])
    (folder / "train-2.jsonl").write_text(text[2] + "\r\n")
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path, [{"i": i} for i in range(ROWS)])


def config(path: Path, **knobs: Any) -> DatasetConfig:
    return DatasetConfig(
        **{"path": str(path), "name": "", "type": "plain", "stream": True, "shuffle_window": 20, **knobs}
    )


def stream(data: DatasetConfig, on_bad_row: str = "error") -> RowStream:
    def convert(number: int, values: dict[str, Any]) -> dict[str, Any]:
        row = dict(parsed(values))
        if "i" not in row:
            raise BadRow("i", None, "expected a number")
        return row

    return RowStream(data.parts()[0], data, Conversion(convert, lambda row: row["i"], "rows"), on_bad_row)


def take(rows: Iterator[Any], count: int) -> list[Any]:
    return [next(rows)["i"] for _ in range(count)]


@pytest.mark.parametrize("error", [httpx.ReadTimeout("the hub is silent"), ConnectionError("the hub is gone")], ids=str)
def test_a_source_that_breaks_off_is_named_with_its_last_row(shards: Path, error: Exception) -> None:
    def breaks_off() -> Iterator[Any]:
        raise error
        yield

    rows = stream(config(shards))
    take(rows, 20)
    rows._raw = breaks_off()
    with pytest.raises(UserError, match=rf"{shards} cannot be read after row 20 \({error}\)"):
        take(rows, 1)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(shards: Path) -> None:
    rows = stream(config(shards))
    first, second = take(rows, ROWS), take(rows, ROWS)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert first == take(stream(config(shards)), ROWS) != take(stream(config(shards, seed=1)), ROWS)


def test_every_window_of_a_file_has_an_order_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"i": i}) for i in range(60)))
    rows = take(stream(config(tmp_path)), 60)
    windows = [[row - first for row in rows[first : first + 20]] for first in (0, 20, 40)]
    assert [sorted(window) for window in windows] == [list(range(20))] * 3
    assert len({tuple(window) for window in windows}) == 3


def test_an_unshuffled_stream_keeps_the_files_order(shards: Path) -> None:
    assert take(stream(config(shards, shuffle=False)), ROWS + 3) == [*range(ROWS), 0, 1, 2]


def test_parquet_is_streamed_too(tmp_path: Path) -> None:
    for part in range(2):
        table = pa.table({"i": list(range(part * 50, part * 50 + 50))})
        pq.write_table(table, tmp_path / f"train-{part}.parquet", row_group_size=7)
    rows = stream(config(tmp_path))
    assert sorted(take(rows, 100)) == list(range(100))
    state = json.loads(json.dumps(rows.state_dict()))
    resumed = stream(config(tmp_path))
    resumed.load_state_dict(state)
    assert take(resumed, 30) == take(rows, 30)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_resumes_at_the_next_row_wherever_it_was_cut(shards: Path, shuffle: bool) -> None:
    data = config(shards, shuffle=shuffle, batch_size=4)
    batches = StreamBatches(stream(data), data)
    states, expected = [], []
    for _ in range(60):  # 2.6 epochs of three files, windows of 20 rows
        states.append(json.dumps(batches.state_dict()))
        expected.append(next(batches))
    for cut in table.every(2, [0, 1, 4, 5, 13, 22, 23, 41, 59]):
        resumed = StreamBatches(stream(data), data)
        resumed.load_state_dict(json.loads(states[cut]))
        again = StreamBatches(stream(data), data)  # the state of a resumed stream that has read no further window
        again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
        assert [next(resumed) for _ in range(60 - cut)] == expected[cut:]
        assert [next(again) for _ in range(60 - cut)] == expected[cut:]


def test_no_more_than_a_window_of_rows_is_held(shards: Path) -> None:
    rows = stream(config(shards))
    for _ in range(ROWS):
        next(rows)
        assert len(rows._window) <= 20


def test_shares_of_mixed_streams_are_those_of_the_weights(shards: Path) -> None:
    data = config(shards)
    weights = [5.0, 3.0, 2.0]
    mixed = StreamMixture([stream(data) for _ in weights], weights, ["a", "b", "c"], seed=11)
    draws = 3000
    counts = Counter(next(mixed)[ORIGIN]["source"] for _ in range(draws))
    expected = [draws * weight / 10 for weight in weights]
    squared = sum((counts[label] - mean) ** 2 / mean for label, mean in zip("abc", expected, strict=True))
    assert squared < 13.82  # the 99.9% point of chi square with 2 degrees of freedom


def test_a_mixture_of_streams_resumes_token_for_token(tokenizer: PreTrainedTokenizerBase) -> None:
    sources = [
        SourceConfig("arithmetic", "main", weight=2, label="a"),
        SourceConfig("arithmetic", "main", "test", weight=1, label="b"),
    ]
    data = DatasetConfig(sources=sources, stream=True, shuffle_window=30, batch_size=5, max_length=64)

    def batches() -> Any:
        return batches_of(get_sft_dataset(data, tokenizer), data, pad_sequences_to_tensors)

    unbroken, first = batches(), batches()
    for _ in range(9):
        next(unbroken), next(first)
    resumed = batches()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    stats_tracker.export()
    for _ in range(9):
        a, b = next(unbroken), next(resumed)
        assert all(torch.equal(a[name], b[name]) for name in ("input_ids", "loss_mask", "attention_mask"))
    stats = stats_tracker.export()
    assert stats["data/a/share"] + stats["data/b/share"] == pytest.approx(1)


def test_streamed_rows_are_those_of_the_data_set_in_memory(tokenizer: PreTrainedTokenizerBase) -> None:
    sums = DatasetConfig(split="test", max_length=64, shuffle=False, batch_size=16, instruction="\nBe quick.")
    pairs = dataclasses.replace(sums, path="arithmetic_pairs", type="chat_template.default", instruction="")
    readers: list[tuple[Any, DatasetConfig]] = [
        (get_sft_dataset, sums),
        (get_rl_dataset, sums),
        (get_preference_dataset, pairs),
    ]
    for read, data in readers:
        streamed = read(dataclasses.replace(data, stream=True), tokenizer)
        whole = list(read(data, tokenizer))
        assert [next(streamed) for _ in whole] == whole
    data = dataclasses.replace(pairs, stream=True)
    batch = next(batches_of(get_preference_dataset(data, tokenizer), data, pack_preferences))
    expected = next(Batches(get_preference_dataset(pairs, tokenizer), pairs, pack_preferences))
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert torch.equal(batch["row_ids"], expected["row_ids"])
    assert column_sets(get_rl_dataset(dataclasses.replace(sums, stream=True), tokenizer)) == {
        "": {"answer", "messages"}
    }


def test_long_and_bad_rows_are_skipped_or_end_the_run_with_their_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"i": i} for i in range(150)]
    write_shards(tmp_path, [*rows, {"j": 1}])
    stats_tracker.export()
    skipping = stream(config(tmp_path, shuffle=False, max_length=140), "skip")
    assert take(skipping, 142) == [*range(141), 0]
    assert stats_tracker.export()["data/skipped_rows"] == 10
    assert "row 141 of" in caplog.text
    assert "row 150 of" in caplog.text
    strict = stream(config(tmp_path, shuffle=False))
    take(strict, 150)
    with pytest.raises(UserError, match=r"row 150 of .* does not fit the type plain: i is missing or null.*on_bad_row"):
        next(strict)
    mixed = StreamMixture([strict], [1.0], ["odd"], 0)
    strict._at -= 1
    with pytest.raises(UserError, match=r"^source odd: row 150 of"):
        next(mixed)


@pytest.mark.parametrize(
    ("text", "knobs", "message"),
    [
        ("", {}, "is empty: it holds no rows"),
        ("\n\n", {}, "is empty: it holds no rows"),
        ('[{"i": 1}]', {}, "is one JSON array, which stream=true cannot read; write one row per line"),
        ('{"j": 1}\n', {}, "1 of the first 1 rows of .* do not fit the type plain: row 0: i is missing"),
        ('{"i": 9}\n', {"max_length": 3}, r"the first 1 rows of .* are all over max_length 3 \(the shortest has 9"),
        ('{"i": 1}\n', {"split": "train[:10]"}, "a slice needs the number of rows; name a split alone"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_the_run(
    tmp_path: Path, text: str, knobs: dict[str, Any], message: str
) -> None:
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        stream(config(tmp_path, **knobs))
    assert "\n" not in str(error.value)


def test_an_epoch_without_a_usable_row_ends_the_run(shards: Path) -> None:
    rows = stream(config(shards))
    rows.keep = lambda number, row: False
    with pytest.raises(UserError, match="has no usable row in a whole epoch"):
        next(rows)


def test_a_resume_with_other_settings_is_refused(shards: Path) -> None:
    data = config(shards, batch_size=4)
    state = StreamBatches(stream(data), data).state_dict()
    small = config(shards, batch_size=4, shuffle_window=10)
    with pytest.raises(UserError, match="shuffle_window was 20 at the checkpoint and is 10 now"):
        StreamBatches(stream(small), small).load_state_dict(state)
    with pytest.raises(UserError, match=r"train_dataset.stream was true at the checkpoint and is false now"):
        Batches([{"i": 1}] * 4, data).load_state_dict(state)
    with pytest.raises(UserError, match=r"train_dataset.stream was false at the checkpoint and is true now"):
        StreamBatches(stream(data), data).load_state_dict(Batches([{"i": 1}] * 4, data).state_dict())
    with pytest.raises(UserError, match="the sources were a at the checkpoint and are b now"):
        StreamMixture([stream(data)], [1], ["b"], 0).load_state_dict(
            StreamMixture([stream(data)], [1], ["a"], 0).state_dict()
        )


@pytest.mark.parametrize(
    ("train", "valid", "skip", "method", "message"),
    [
        ({}, {"stream": True}, "off", "sft", "valid_dataset.stream=true: an evaluation takes all held-out rows"),
        ({"stream": True, "num_workers": 2}, {}, "off", "sft", "train_dataset.num_workers=2"),
        ({"stream": True}, {}, "both", "rl", "curriculum.skip=both keeps a measurement of every prompt"),
        ({}, {}, "solved", "sft", "curriculum.skip=solved goes by the rewards of completions"),
        (
            {"stream": True, "sources": [SourceConfig("a"), SourceConfig("b")]},
            {},
            "off",
            "rl",
            "mixes sources by their weights",
        ),
        (
            {"sources": [SourceConfig("a", weight=1), SourceConfig("b")]},
            {},
            "off",
            "rl",
            r"^train_dataset.sources have",
        ),
    ],
)
def test_knobs_that_need_a_length_are_refused(
    train: dict[str, Any], valid: dict[str, Any], skip: str, method: str, message: str
) -> None:
    checks = data_checks(method, DatasetConfig(**train), DatasetConfig(**valid), CurriculumConfig(skip=skip))
    with pytest.raises(UserError, match=message):
        run_all(checks)
