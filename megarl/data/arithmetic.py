"""Bundled task: two-step sums written as GSM8K problems, so that a run needs no download.

A problem is a start and two changes, each a digit from 1 to 9. No intermediate result is negative:

    question  Leo has 7 pens. Leo buys 1 more. Then Leo finds 1. How many pens?
    answer    7+1=8
              8+1=9
              #### 9

The sums of the test split never occur in the train split, in any wording. Held-out accuracy therefore measures
arithmetic and not memory. `train_dataset.path=arithmetic` writes both splits as jsonl into a cache folder, and reads
them from there like any local folder.
"""

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megarl.knobs import UserError

TRAIN_SIZE = 16_000
TEST_SIZE = 256

NAMES = ("Leo", "Mia", "Ben", "Zoe", "Sam", "Ana")
OBJECTS = ("pens", "cups", "nuts", "eggs", "figs", "hats")
GAINS = ("buys", "gets", "finds", "wins")
LOSSES = ("sells", "eats", "loses", "drops")
QUESTIONS = (
    "{name} has {a} {things}. {name} {verb1} {b}{more}. Then {name} {verb2} {c}. How many {things}?",
    "{name} has {a} {things}. {name} {verb1} {b}{more}, then {verb2} {c}. How many {things} has {name}?",
)


class Sum(NamedTuple):
    """The sum `a op1 b op2 c`, evaluated from left to right. The operators are "+" and "-"."""

    a: int
    op1: str
    b: int
    op2: str
    c: int

    @property
    def middle(self) -> int:
        return self.a + self.b if self.op1 == "+" else self.a - self.b

    @property
    def result(self) -> int:
        return self.middle + self.c if self.op2 == "+" else self.middle - self.c


def all_sums() -> list[Sum]:
    """Lists every sum of the task: operands 1 to 9, never negative at any step."""
    digits, operators = range(1, 10), "+-"
    sums = itertools.starmap(Sum, itertools.product(digits, operators, digits, operators, digits))
    return [s for s in sums if s.middle >= 0 and s.result >= 0]


def split_sums(seed: int = 0) -> tuple[list[Sum], list[Sum]]:
    """Splits the sums into train and test. No sum is in both."""
    sums = all_sums()
    random.Random(f"split {seed}").shuffle(sums)
    return sums[TEST_SIZE:], sums[:TEST_SIZE]


def answer_of(s: Sum) -> str:
    """Writes the two steps and `#### result`, in GSM8K's layout."""
    return f"{s.a}{s.op1}{s.b}={s.middle}\n{s.middle}{s.op2}{s.c}={s.result}\n#### {s.result}"


def question_of(s: Sum, rng: random.Random) -> str:
    """Writes the sum as a question in a random wording."""
    verb1 = rng.choice(GAINS if s.op1 == "+" else LOSSES)
    verb2 = rng.choice(GAINS if s.op2 == "+" else LOSSES)
    return rng.choice(QUESTIONS).format(
        name=rng.choice(NAMES), things=rng.choice(OBJECTS), verb1=verb1, verb2=verb2, a=s.a, b=s.b, c=s.c,
        more=" more" if s.op1 == "+" and rng.random() < 0.5 else "",
    )  # fmt: skip


def generate(split: str, seed: int = 0) -> list[dict[str, str]]:
    """Generates the rows of `split` ("train" or "test"). Deterministic in `seed`; no question occurs twice."""
    train, test = split_sums(seed)
    sums, size = {"train": (train, TRAIN_SIZE), "test": (test, TEST_SIZE)}[split]
    rng = random.Random(f"{split} {seed}")
    rows: dict[str, str] = {}
    while len(rows) < size:
        rng.shuffle(sums)
        for s in sums[: size - len(rows)]:
            rows[question_of(s, rng)] = answer_of(s)
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def write_arithmetic(
    folder: Path, seed: int = 0, generate: Callable[[str, int], list[dict[str, Any]]] = generate
) -> Path:
    """Writes `train.jsonl` and `test.jsonl` into `folder`; a file that already holds the same text is left alone."""
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in generate(split, seed))
        path = folder / f"{split}.jsonl"
        try:
            if path.exists() and path.read_text() == text:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(text)
            partial.replace(path)  # several ranks may write at once: rename, so that no reader sees half a file
        except OSError as error:
            raise UserError(
                f"the bundled data set cannot be written to {folder} ({error.strerror}); "
                "set XDG_CACHE_HOME to a folder that you may write"
            ) from error
    return folder


def cache_folder(name: str = "arithmetic") -> Path:
    """Cache folder of `name`: `megarl/NAME` in `$XDG_CACHE_HOME`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl" / name
