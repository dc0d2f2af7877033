"""Random rows in data files: every loader gives examples, or a `UserError` in one line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.config import DatasetConfig
from megarl.data.examples import get_preference_dataset
from megarl.data.preference import JUDGED, PAIRS
from megarl.data.prompts import get_rl_dataset
from megarl.data.sft import get_sft_dataset
from megarl.data.sources import MAX_NESTING, load_rows, load_table
from megarl.knobs import UserError
from tests.fuzzing import fuzzed

ROW = '{"question": "2+2", "answer": "4"}\n'
HUGE, DEEP = "a huge number", "a deep list"  # stand for values that `json.dumps` cannot write
TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "7", "#### 7", "user", "assistant", "<|im_end|>", "\n", "\u2028", "\0", "\ud800", "é", "\U0001f600",
         "{prompt}", "{{ x }}", "{% raw %}", "true", "x" * 20_000, "\\boxed{", "\x1b[2J", "\u202e"]
    ),
    st.text(max_size=8),
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.sampled_from([2**63, -(10**30), HUGE, DEEP]), st.floats(), TEXTS
)
ROLES = st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool"])
MESSAGES = st.fixed_dictionaries(
    {"role": st.one_of(ROLES, ROLES, ROLES, SCALARS), "content": st.one_of(TEXTS, SCALARS)}
)
CHATS = st.one_of(
    st.lists(MESSAGES, max_size=4),
    st.just([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]),
    st.just([{"role": "user", "content": "2+2"}]),
)
NESTED = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2))
RANKED = st.lists(st.fixed_dictionaries({"answer": st.one_of(TEXTS, SCALARS), "rank": SCALARS}), max_size=3)
COLUMNS = (
    "question", "answer", "messages", "prompt", "chosen", "rejected", "completion", "label", "system", "input",
    "instruction", "chosen_response", "rejected_response", "answers", "prompt_ids", "problem", "json",
)  # fmt: skip
VALUES = st.one_of(TEXTS, CHATS, TEXTS, CHATS, MESSAGES, RANKED, NESTED)
ROWS = st.one_of(
    st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=8),
    st.fixed_dictionaries({"question": TEXTS, "answer": st.just("2+2=4\n#### 4")}),
    st.fixed_dictionaries({"messages": CHATS, "chosen": CHATS, "rejected": CHATS, "prompt": TEXTS}),
    st.fixed_dictionaries({"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS, "completion": TEXTS, "label": SCALARS}),
    st.fixed_dictionaries({"prompt": TEXTS, "answers": RANKED}),
    NESTED,
)
TYPES = [
    ("rl", "gsm8k"), ("rl", "messages"), ("sft", "gsm8k"), ("sft", "messages"),
    *(("pairs", name) for name in PAIRS if name != "user_defined.default"),
    *(("judged", name) for name in JUDGED if name != "user_defined.default"),
]  # fmt: skip


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file of JSON lines or of one array; at times with bytes changed or cut off."""
    rows = draw(st.lists(ROWS, min_size=1, max_size=3))
    ascii_only, is_array = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in ([rows] if is_array else rows)]
    text = "\n".join(lines).replace(f'"{HUGE}"', "9" * 5000).replace(f'"{DEEP}"', "[" * 20_000 + "]" * 20_000)
    content = text.encode("utf-8", "surrogatepass")
    damage = draw(st.integers(0, 15))
    if damage == 0:
        return content[: draw(st.integers(0, len(content)))]
    if damage == 1:
        at = draw(st.integers(0, len(content)))
        return content[:at] + draw(st.binary(max_size=2)) + content[at:]
    return content


def load(method: str, config: DatasetConfig, tokenizer: Any, on_bad_row: str) -> Any:
    if method == "rl":
        return get_rl_dataset(config, tokenizer, on_bad_row)
    if method == "sft":
        return get_sft_dataset(config, tokenizer, on_bad_row)
    return get_preference_dataset(config, tokenizer, paired=method == "pairs", on_bad_row=on_bad_row)


def assert_usable(method: str, row: dict[str, Any]) -> None:
    """Checks that an example has what training reads of it."""
    if method == "rl":
        assert row["messages"]
        assert all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in row["messages"])
        json.dumps(row).encode()
    elif method == "sft":
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert set(row["loss_mask"]) <= {0, 1}
    else:
        assert row["prompt_ids"]
        assert all(row[name] for name in row if name.endswith("_ids"))


@fuzzed(bounded=200, long=10_000)
def test_random_rows_are_examples_or_refused_in_one_line(effort: Any, tmp_path: Path, chatml_tokenizer: Any) -> None:
    @effort
    @given(files(), st.sampled_from(TYPES), st.sampled_from(["error", "skip"]))
    def holds(content: bytes, type_: tuple[str, str], on_bad_row: str) -> None:
        method, name = type_
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            path = Path(folder, "train.jsonl")
            path.write_bytes(content)
            config = DatasetConfig(path=str(path), split="train", type=name, max_length=4096)
            try:
                dataset = load(method, config, chatml_tokenizer, on_bad_row)
            except UserError as error:
                message = str(error)
            else:
                for row in dataset:
                    assert_usable(method, row)
                return
        assert len(message.splitlines()) == 1

    holds()


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_value_nested_so_deep_that_the_reader_would_end_the_process_is_refused(tmp_path: Path, suffix: str) -> None:
    path, deep = tmp_path / f"train.{suffix}", MAX_NESTING + 1
    lines = '{"question": "2+2", "answer": "4"}\n{"answer": ' + "[" * deep + "]" * deep + "}\n"
    with fsspec.open(str(path), "wt", compression="infer") as stream:
        stream.write(lines)
    with pytest.raises(UserError, match=rf"{suffix}, line 2: lists and objects nest {deep + 1} deep; at most"):
        load_table(str(path), "train")


def test_brackets_in_texts_and_wide_lists_are_no_nesting(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"question": '[{"\\' * 10 * MAX_NESTING, "answer": [[1]] * 2 * MAX_NESTING}
    path.write_text(json.dumps(row) + "\n")
    assert load_table(str(path), "train")[0] == row


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("null\n", "line 1"),
        ("\ufeffnull\n", "line 1"),
        ("\n null\n" + ROW, "line 2"),
        ("null " + ROW, "line 1"),
        (ROW + "null\n" + ROW, "line 2"),
        ("[null, " + ROW + "]", "row 0"),
        ("\ufeff[" + ROW + ", null]", "row 1"),
        ("[" + ROW + ",\nnull\n]", "row 1"),
    ],
)
def test_a_null_row_that_would_end_the_process_in_the_reader_is_refused(
    tmp_path: Path, content: str, place: str
) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(UserError, match=f"train.jsonl, {place}: the row is null; remove it$"):
        load_table(str(tmp_path / "train.jsonl"), "train")


@pytest.mark.parametrize("name", [r"\u0000", r"a\u0000", r"a\\\u0000", r"\"\u0000b"])
def test_a_name_with_nul_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """Arrow ends it there: two columns with one name, and a traceback of its own."""
    path = tmp_path / "train.jsonl"
    for row in (f'{{"": "1", "a": "2", "{name}" : null}}', f'{{"question": {{"": "1", "{name}": "2"}}}}'):
        path.write_text(f"{ROW}{row}\n")
        with pytest.raises(UserError, match=r"line 2: a name has the character \\u0000, .*; rename it$"):
            load_table(str(path), "train")


def test_nul_in_a_text_and_a_name_with_its_escape_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"a\\u0000": "", "question": '\0": ', "answer": '"\0'}
    path.write_text(json.dumps(row) + "\n")
    assert load_table(str(path), "train")[0] == row


def test_text_that_is_not_utf_8_is_refused_in_one_line(tmp_path: Path) -> None:
    lone_surrogate = "\ud800".encode("utf-8", "surrogatepass")
    content = b'{"question": "2+2", "answer": "4"}\n{"question": "%s", "answer": "4"}\n' % lone_surrogate
    (tmp_path / "train.jsonl").write_bytes(content)
    text = pa.array([b"2+2", lone_surrogate]).view(pa.utf8())
    pq.write_table(pa.table({"question": text}), tmp_path / "train.parquet")
    for name, read in (("train.jsonl", load_table), ("train.parquet", load_table), ("train.parquet", load_rows)):
        with pytest.raises(UserError, match=rf"{name} has text that is not UTF-8 \(.*Column 0: .*; write it as UTF-8$"):
            read(str(tmp_path / name), "train")


@pytest.mark.parametrize(
    "split", ["", "\n", "train[", "train[5", "train[::]", "train[:999%]", "train+", "train[:5]+test"]
)
def test_a_split_that_names_no_rows_is_refused_in_one_line(tmp_path: Path, split: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "2+2", "answer": "4"}\n')
    for read in (load_rows, load_table):
        with pytest.raises(UserError) as refused:
            read(str(tmp_path / "train.jsonl"), split)
        assert "\n" not in str(refused.value)
