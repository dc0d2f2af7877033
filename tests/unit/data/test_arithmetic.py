import json
import random
import re
from pathlib import Path

import pytest

from megarl.data.arithmetic import (
    TEST_SIZE,
    TRAIN_SIZE,
    all_sums,
    answer_of,
    cache_folder,
    generate,
    question_of,
    split_sums,
    write_arithmetic,
)
from megarl.knobs import UserError


def numbers_and_operators(answer: str) -> tuple[str, ...]:
    first, second, _ = answer.split("\n")
    return (*re.findall(r"[0-9]+|[-+]", first.split("=")[0]), *re.findall(r"[0-9]+|[-+]", second.split("=")[0])[1:])


@pytest.mark.parametrize("seed", [0, 7])
def test_no_sum_of_the_test_split_is_in_the_train_split(seed: int) -> None:
    train, test = split_sums(seed)
    assert set(train).isdisjoint(test)
    assert len(train) + len(test) == len(all_sums())
    written = [{numbers_and_operators(row["answer"]) for row in generate(split, seed)} for split in ("train", "test")]
    assert written[0].isdisjoint(written[1])
    assert len(written[1]) == TEST_SIZE


def test_every_answer_is_right_and_never_negative() -> None:
    for s in all_sums():
        first, second, last = answer_of(s).split("\n")
        left, middle = first.split("=")
        right, result = second.split("=")
        assert eval(left) == int(middle) >= 0
        assert eval(right) == int(result) >= 0
        assert right.startswith(middle)
        assert last == f"#### {result}"
        assert all(1 <= digit <= 9 for digit in (s.a, s.b, s.c))


def test_a_question_names_the_three_numbers_and_a_change_per_operator() -> None:
    gains, losses = {"buys", "gets", "finds", "wins"}, {"sells", "eats", "loses", "drops"}
    for s in random.Random(0).sample(all_sums(), 200):
        question = question_of(s, random.Random(1))
        assert sorted(map(int, re.findall(r"\d", question))) == sorted((s.a, s.b, s.c))
        verbs = [w for w in re.findall(r"[a-z]+", question) if w in gains | losses]
        assert ["+" if v in gains else "-" for v in verbs] == [s.op1, s.op2]


def test_the_rows_depend_only_on_the_seed() -> None:
    assert generate("train") == generate("train")
    assert generate("test", 0) != generate("test", 1)


def test_the_default_runs_see_no_question_twice() -> None:
    train, test = generate("train"), generate("test")
    assert len({row["question"] for row in train}) == len(train) == TRAIN_SIZE >= 500 * 32
    assert len({row["question"] for row in test}) == len(test) == TEST_SIZE


def test_the_splits_are_written_once_in_gsm8k_columns(tmp_path: Path) -> None:
    folder = write_arithmetic(tmp_path / "deep" / "folder")
    assert sorted(f.name for f in folder.iterdir()) == ["test.jsonl", "train.jsonl"]
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    assert rows == generate("test")
    assert set(rows[0]) == {"question", "answer"}
    before = (folder / "train.jsonl").stat().st_mtime_ns
    (folder / "test.jsonl").write_text("damaged")
    write_arithmetic(folder)
    assert (folder / "train.jsonl").stat().st_mtime_ns == before
    assert [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()] == rows


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        write_arithmetic(tmp_path / "file" / "folder")


def test_the_cache_folder_follows_xdg(caches: Path) -> None:
    assert cache_folder() == caches / "megarl" / "arithmetic"
