import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from preference_cases import JUDGED_CASES, PAIR_CASES, Case

from megarl.data import prepare
from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.examples import get_preference_dataset
from megarl.data.preference import JUDGED, PAIRS, format_of
from megarl.data.prepare import LISTED
from megarl.data.templates import CHATML, LLAMA3
from megarl.knobs import UserError

CASES = [*PAIR_CASES, *JUDGED_CASES]
EOS = "<|endoftext|>"


def dataset_of(case: Case, rows: list[Any], tokenizer: Any, folder: Path, on_bad_row: str = "error") -> Any:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(path=str(file), type=case.type, options=case.options)
    return get_preference_dataset(config, tokenizer, case.label is None, on_bad_row)


def columns(case: Case) -> list[str]:
    return ["completion_ids"] if case.label is not None else ["chosen_ids", "rejected_ids"]


def test_the_cases_cover_every_format_with_three_bad_rows_each() -> None:
    assert {case.type for case in PAIR_CASES} == set(PAIRS)
    assert {case.type for case in JUDGED_CASES} == set(JUDGED)
    assert min(len(case.bad) for case in CASES) >= 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_prompt_and_completions_come_out_token_for_token(case: Case, tokenizers: Any, tmp_path: Path) -> None:
    # With the tokenizer's own template, the other tokenizers end turns with other tokens than the case expects.
    for tokenizer in tokenizers[: 1 if case.type.startswith("chat_template") else 3]:
        (row,) = dataset_of(case, [case.row], tokenizer, tmp_path)
        bos = tokenizer.encode("")
        assert row["prompt_ids"] == bos + tokenizer.encode(case.prompt, add_special_tokens=False)
        for name, text in zip(columns(case), case.answers, strict=True):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert row[name] == (
                ids if tokenizer.decode(ids[-1:]) in tokenizer.all_special_tokens else [*ids, tokenizer.eos_token_id]
            )
        assert case.label is None or row["kto_label"] is case.label


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_row_that_does_not_fit_is_named_by_index_field_and_value(case: Case, tokenizer: Any, tmp_path: Path) -> None:
    good, bad = json.loads(json.dumps(case.row)), [case.broken(change) for change, _ in case.bad]
    rows = [good, *bad, "a string", good]
    with pytest.raises(UserError) as caught:
        dataset_of(case, rows, tokenizer, tmp_path)
    message = str(caught.value)
    assert f"{len(bad) + 1} of {len(rows)} rows" in message
    for i, (_, problem) in enumerate(case.bad, 1):
        reported = message.split(f"row {i}: ")[1].split(f"; row {i + 1}: ")[0]
        assert problem in reported
    assert f"row {len(bad) + 1}: the row is 'a string'; expected an object" in message
    kept = dataset_of(case, rows, tokenizer, tmp_path, "skip")
    assert [row["row_id"] for row in kept] == [0, len(rows) - 1]


def test_skipped_rows_are_counted_and_listed(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = PAIR_CASES[0]
    dataset_of(case, [case.row, {"chosen": 1}], tokenizer, tmp_path, "skip")
    assert "1 of 2 rows" in caplog.text
    assert "row 1: chosen is 1; expected a list of messages" in caplog.text
    with pytest.raises(UserError, match="1 of 1 rows"):
        dataset_of(case, [{"chosen": 1}], tokenizer, tmp_path, "skip")


def test_many_bad_rows_are_all_listed_in_a_file(tokenizer: Any, tmp_path: Path) -> None:
    case = PAIR_CASES[0]
    with pytest.raises(UserError, match="all 30 are listed in") as caught:
        dataset_of(case, [case.row, *([{"chosen": 1}] * 30)], tokenizer, tmp_path)
    file = Path(str(caught.value).split("all 30 are listed in ")[1].split(";")[0])
    lines = file.read_text().splitlines()
    assert len(lines) == 30
    assert lines[-1] == "row 30: chosen is 1; expected a list of messages"


@pytest.mark.parametrize(("count", "in_a_file"), [(LISTED, False), (LISTED + 1, True)])
def test_a_file_lists_bad_rows_only_if_the_message_does_not_hold_them(
    count: int, in_a_file: bool, tokenizer: Any, tmp_path: Path
) -> None:
    case = PAIR_CASES[0]
    with pytest.raises(UserError) as caught:
        dataset_of(case, [case.row, *([{"chosen": 1}] * count)], tokenizer, tmp_path)
    assert (f"all {count} are listed in" in str(caught.value)) is in_a_file
    assert f"row {LISTED}: chosen" in str(caught.value)
    assert f"row {LISTED + 1}: chosen" not in str(caught.value)


def test_invalid_json_is_a_bad_row_and_blank_lines_are_skipped(tokenizer: Any, tmp_path: Path) -> None:
    case = PAIR_CASES[0]
    (tmp_path / "a.jsonl").write_text(f"\n{json.dumps(case.row)}\n\n{{'chosen': 1\n\n")
    config = DatasetConfig(path=str(tmp_path / "a.jsonl"), type=case.type)
    with pytest.raises(UserError, match=r"row 1: the row is .*; expected JSON \(Expecting property name"):
        get_preference_dataset(config, tokenizer)


@pytest.mark.parametrize("ending", ["json", "jsonl", "jsonl.gz", "parquet"])
def test_every_kind_of_file_gives_the_same_examples(ending: str, tokenizer: Any, tmp_path: Path) -> None:
    import gzip

    case = next(case for case in PAIR_CASES if case.type == "chat_template.default")
    file = tmp_path / f"train.{ending}"
    if ending == "json":
        file.write_text(json.dumps([case.row] * 3, indent=1))
    elif ending == "jsonl.gz":
        file.write_bytes(gzip.compress(f"{json.dumps(case.row)}\n".encode() * 3))
    elif ending == "parquet":
        Dataset.from_list([case.row] * 3).to_parquet(file)
    else:
        file.write_text(f"{json.dumps(case.row)}\n" * 3)
    config = DatasetConfig(path=str(file), type=case.type, split="train[1:]")
    rows = list(get_preference_dataset(config, tokenizer))
    assert len(rows) == 2
    assert tokenizer.decode(rows[0]["prompt_ids"] + rows[0]["rejected_ids"]) == case.prompt + case.answers[1]


def test_a_bos_is_written_once_if_the_tokenizer_adds_one(llama3_tokenizer: Any, tmp_path: Path) -> None:
    fixed = next(case for case in PAIR_CASES if case.type == "chatml")
    (row,) = dataset_of(fixed, [fixed.row], llama3_tokenizer, tmp_path)
    assert row["prompt_ids"].count(llama3_tokenizer.bos_token_id) == 1
    assert row["prompt_ids"][0] == llama3_tokenizer.bos_token_id
    assert llama3_tokenizer.bos_token_id not in row["chosen_ids"] + row["rejected_ids"]
    llama3_tokenizer.chat_template = LLAMA3.jinja()  # this template writes the bos itself
    case = next(case for case in PAIR_CASES if case.type == "chat_template.default")
    (row,) = dataset_of(case, [case.row], llama3_tokenizer, tmp_path)
    chat = [*case.row["messages"], case.row["chosen"]]
    assert row["prompt_ids"] + row["chosen_ids"] == llama3_tokenizer.apply_chat_template(chat, return_dict=False)
    assert row["prompt_ids"].count(llama3_tokenizer.bos_token_id) == 1


def test_a_cache_is_of_one_tokenizer(tokenizer: Any, llama3_tokenizer: Any, tmp_path: Path) -> None:
    case = next(case for case in PAIR_CASES if case.type.startswith("user_defined"))
    rows = [dataset_of(case, [case.row], one, tmp_path)[0] for one in (tokenizer, llama3_tokenizer, tokenizer)]
    assert rows[0] == rows[2]
    assert rows[1]["prompt_ids"] == [llama3_tokenizer.bos_token_id, *rows[0]["prompt_ids"]]
    assert rows[1]["chosen_ids"] == [*rows[0]["chosen_ids"][:-1], llama3_tokenizer.eos_token_id]


def test_the_named_templates_write_the_same_text_as_the_fixed_formats(tokenizers: Any) -> None:
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": "2+3?\n"}]
    for tokenizer in tokenizers:
        for turns in (CHATML, LLAMA3):
            bos = tokenizer.bos_token or "" if turns is LLAMA3 else ""
            written = tokenizer.apply_chat_template(
                chat, chat_template=turns.jinja(), tokenize=False, add_generation_prompt=True
            )
            assert written == bos + turns.prompt(chat)


def test_whitespace_after_the_end_of_the_turn_is_not_part_of_a_completion(
    chatml_tokenizer: Any, tmp_path: Path
) -> None:
    chatml_tokenizer.chat_template = CHATML.jinja()
    case = next(case for case in PAIR_CASES if case.type == "chat_template.argilla_chat")
    (row,) = dataset_of(case, [case.row], chatml_tokenizer, tmp_path)
    assert chatml_tokenizer.decode(row["chosen_ids"]) == "5<|im_end|>"


def test_a_template_that_does_not_continue_its_prompt_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    case = next(case for case in PAIR_CASES if case.type == "chat_template.default")
    with pytest.raises(UserError, match=r"set data\.chat_template"):
        dataset_of(case, [case.row], tokenizer, tmp_path)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="needs a chat template and the tokenizer has none"):
        dataset_of(case, [case.row], tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("type_", "options", "message"),
    [
        ("chatml.argila", {}, "is not a format of pairs; choose from chatml, chatml.default, chatml.argilla"),
        ("chatml.intel", {"field_prompt": "q"}, "field_prompt is not an option of type chatml.intel, which takes none"),
        ("user_defined.default", {"field_label": "l"}, "it takes field_prompt, field_system"),
        ("user_defined.default", {"prompt_format": "{instruction}"}, "it must name {prompt} and may name {system}"),
        ("user_defined.default", {"chosen_format": "{chosen} {rejected}"}, "it must name {chosen} alone"),
        ("user_defined.default", {"prompt_format": "{prompt"}, "is not a format string"),
        ("user_defined.default", {"prompt_format": "{prompt.__class__}"}, "it must name {prompt}"),
    ],
)
def test_an_unknown_type_or_option_is_refused(type_: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        format_of(SourceConfig("a.jsonl", type=type_, options=options), paired=True)
    assert message in str(caught.value)


def test_a_second_start_reads_the_cache_unless_anything_changed(
    tokenizer: Any, tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in PAIR_CASES if case.type == "chat_template.default")
    folder = caches / "megarl" / "prepared"
    first = list(dataset_of(case, [case.row], tokenizer, tmp_path))
    files = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert len(files) == 1
    with monkeypatch.context() as patch:
        patch.setattr("megarl.data.examples.Writer.__call__", lambda *_: pytest.fail("prepared again"))
        (tmp_path / "copy").mkdir()
        assert list(dataset_of(case, [case.row], tokenizer, tmp_path / "copy")) == first  # by content, not by path
    tokenizer.encode("used", truncation=True, max_length=2)  # changes the tokenizer's state
    dataset_of(case, [case.row], tokenizer, tmp_path)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == files
    other = {**case.row, "chosen": {"role": "assistant", "content": "five"}}
    dataset_of(case, [other], tokenizer, tmp_path)
    tokenizer.chat_template = CHATML.jinja()
    dataset_of(case, [case.row], tokenizer, tmp_path)
    monkeypatch.setattr(prepare, "_source_hash", lambda: "other code")
    dataset_of(case, [case.row], tokenizer, tmp_path)
    assert len(list(folder.iterdir())) == 4
