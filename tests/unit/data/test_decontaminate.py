"""Rows that share n words with held-out rows are found, all of them and no others, reported or dropped."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from megarl.data import decontaminate
from megarl.data.config import DataConfig, DatasetConfig, SourceConfig
from megarl.data.decontaminate import HeldOut, decontaminated, text_of, words_of
from megarl.data.mixture import Mixture
from megarl.data.prompts import get_rl_dataset
from megarl.data.sft import get_sft_dataset
from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


def prompt(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def knobs(mode: str, words: int = 13) -> DataConfig:
    return DataConfig(decontaminate=mode, decontaminate_words=words)


def test_overlaps_are_those_that_a_search_through_all_pairs_finds() -> None:
    rng = random.Random(2)
    texts = [[" ".join(rng.choices("abcdef", k=rng.randint(0, 12))) for _ in range(40)] for _ in range(2)]
    n = 5
    known = HeldOut(texts[0], n)
    runs = [{tuple(words_of(t)[i : i + n]) for i in range(len(words_of(t)) - n + 1)} for t in texts[0]]
    common = {run for row in runs for run in row if sum(run in other for other in runs) > 3}
    for text in texts[1]:
        words = words_of(text)
        mine = {tuple(words[i : i + n]) for i in range(len(words) - n + 1)} - common
        expected = any(mine & row for row in runs) if len(words) >= n else bool(words) and text in texts[0]
        found = known.overlap(text)
        assert (found is not None) == expected
        if found:
            assert f" {found[1]} " in f" {' '.join(words_of(texts[0][found[0]]))} "


def test_case_and_punctuation_do_not_hide_an_overlap() -> None:
    known = HeldOut(["nothing alike", f"So: {LONG}."], 13)
    assert known.overlap(f"{LONG.upper().replace(' ', ', ')}!") == (1, LONG)
    assert known.overlap(LONG.replace("seven", "7")) is None
    assert known.overlap(LONG.rsplit(" ", 1)[0]) is None  # twelve words


def test_texts_shorter_than_the_run_match_as_a_whole() -> None:
    known = HeldOut(["What is 2 + 3?"], 13)
    assert known.overlap("what is 2+3") == (0, "what is 2 3")
    assert known.overlap("What is 2 + 3 + 4?") is None


def test_instructions_in_every_held_out_row_are_no_overlap() -> None:
    held_out = [f"{number} is the question. {LONG}" for number in range(100)]
    assert HeldOut(held_out, 13).overlap(f"Another one. {LONG}") is None
    assert HeldOut(held_out[:3], 13).overlap(f"Another one. {LONG}") is not None


def test_hashes_that_collide_are_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decontaminate, "_word_hash", lambda word: 7)
    assert HeldOut([LONG], 3).overlap("quite other words here") is None


@pytest.mark.parametrize("as_list", [True, False])
def test_overlapping_rows_are_named_and_dropped_if_asked(
    caplog: pytest.LogCaptureFixture, tokenizer: PreTrainedTokenizerBase, as_list: bool
) -> None:
    rows = [prompt("a clean row"), prompt(f"please {LONG}"), prompt("another clean row")]
    data: Any = rows if as_list else Dataset.from_list(rows)
    held_out = [prompt("x"), prompt(LONG)]
    reported = decontaminated(data, held_out, tokenizer, knobs("report"))
    assert list(reported) == rows
    assert f"1 of 3 rows share 13 words with held-out rows: row 1 with held-out row 1 ('{LONG}')" in caplog.text
    assert list(decontaminated(data, held_out, tokenizer, knobs("drop"))) == [rows[0], rows[2]]
    assert decontaminated(data, held_out, tokenizer, knobs("off")) is data


def test_a_mixture_is_checked_source_by_source(
    caplog: pytest.LogCaptureFixture, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = Mixture([[prompt("clean")] * 2, [prompt(LONG), prompt("clean")]], [1, 1], ["good", "bad"])
    dropped = decontaminated(data, [prompt(LONG)], tokenizer, knobs("drop"))
    assert [len(part) for part in dropped.parts] == [2, 1]
    assert dropped.starts == [0, 2, 4]  # the shares stay
    assert "none of 2 rows of good" in caplog.text
    assert "1 of 2 rows of bad" in caplog.text


def test_a_data_set_of_held_out_rows_alone_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"1 of 1 rows share 13 words .*; none would be left, so give other data"):
        decontaminated([prompt(LONG)], [prompt(LONG)], tokenizer, knobs("drop"))


def test_memory_is_bounded_by_a_refusal(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decontaminate, "MAX_NGRAMS", 5)
    with pytest.raises(UserError, match="the held-out rows have 11 runs of 3 words, at most 5 are held"):
        HeldOut([LONG], 3)


def test_tokens_are_compared_as_text(tokenizer: PreTrainedTokenizerBase) -> None:
    data = DatasetConfig(split="test[:5]", max_length=64)
    (row, *_), (same, *_) = get_sft_dataset(data, tokenizer), get_rl_dataset(data, tokenizer)
    assert same["messages"][0]["content"] in text_of(row, tokenizer)
    rows = get_sft_dataset(dataclasses.replace(data, split="test[:8]"), tokenizer)
    assert len(decontaminated(rows, get_sft_dataset(data, tokenizer), tokenizer, knobs("drop", 9))) == 3


def test_a_stream_drops_overlapping_rows_as_they_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [prompt(LONG if i % 5 == 0 else f"clean row {i}") for i in range(20)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [SourceConfig(str(file), "", "train", "messages", weight=1, label=label) for label in "ab"]
    config = DatasetConfig(sources=sources, stream=True, shuffle=False)
    for mode, expected in (("drop", 0), ("report", 8)):
        stream = decontaminated(get_rl_dataset(config, tokenizer), [prompt(LONG)], tokenizer, knobs(mode))
        stats_tracker.export()
        texts = [next(stream)["messages"][0]["content"] for _ in range(32 + expected)]
        assert abs(texts.count(LONG) - expected) <= 2 * bool(expected)
        assert stats_tracker.export()["data/overlapping_rows"] >= 4
    assert "of a, and is dropped" in caplog.text
