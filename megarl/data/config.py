"""Knobs of data sets. A separate module, as it imports fast."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megarl.knobs import MAX_COUNT, MAX_SEED, UserError, check_ranges, knob, shown

BUNDLED = "arithmetic"
BUNDLED_PAIRS, BUNDLED_JUDGED = "arithmetic_pairs", "arithmetic_judged"
ON_BAD_ROW = ("error", "skip")
DECONTAMINATE = ("off", "report", "drop")
SKIP = ("off", "solved", "hopeless", "both")
LABEL = re.compile(r"[\w.-]{1,64}")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # owner/name


@dataclass(frozen=True)
class DataConfig:
    """Preparation of rows, for all data sets of a run."""

    on_bad_row: str = knob(
        "error", "rows that do not fit their format: error (list all of them and stop) or skip", choices=ON_BAD_ROW
    )
    chat_template: str = knob("", "chatml, llama3, a file or Jinja text, in place of the tokenizer's chat template")
    decontaminate: str = knob(
        "off",
        "rows to train on that share decontaminate_words with a held-out row: off (not looked for), report (warn and "
        "list them) or drop",
        choices=DECONTAMINATE,
    )
    decontaminate_words: int = knob(13, "words in a row that count as an overlap", least=3, most=1000)

    def __post_init__(self) -> None:
        check_ranges(self, "data")


@dataclass(frozen=True)
class CurriculumConfig:
    """Prompts to leave out for some epochs, by the share of their completions that were right."""

    skip: str = knob("off", "prompts left out: off (none), solved, hopeless, or both; for method=rl", choices=SKIP)
    solved_rate: float = knob(1.0, "least share of right completions of a solved prompt", above=0, most=1)
    hopeless_rate: float = knob(0.0, "largest share of right completions of a hopeless prompt", least=0, below=1)
    patience: int = knob(1, "measurements in a row before a prompt is left out", least=1, most=MAX_COUNT)
    revisit_epochs: int = knob(
        2, "epochs that a prompt is left out; then it is asked, and measured, again", least=1, most=MAX_COUNT
    )

    def __post_init__(self) -> None:
        check_ranges(self, "curriculum")
        if self.hopeless_rate >= self.solved_rate:
            raise UserError(
                f"curriculum.hopeless_rate={self.hopeless_rate:g} must be below curriculum.solved_rate="
                f"{self.solved_rate:g}; a prompt cannot be both"
            )


@dataclass(frozen=True)
class SourceConfig:
    """One of several mixed data sets, as in sources=[{path: a.jsonl, type: chatml.intel, weight: 2}]."""

    path: str = knob("", "as in the data set itself; so are name, split, type and options", path=True)
    name: str = knob("", "configuration on the hub, subfolder on disk; empty: its only one", path=True)
    split: str = knob("train", "split, optionally with a slice")
    type: str = knob("gsm8k", "how rows are read")
    options: dict[str, Any] = knob(factory=dict, meaning="field names and format strings that the type takes")
    weight: float = knob(
        0.0, "share of an epoch's rows relative to the other weights; all 0: every row once", least=0, most=1e9
    )
    label: str = knob("", "name in metrics and messages; empty: the last part of path")


@dataclass(frozen=True)
class DatasetConfig:
    """A data set, or several mixed ones, and the batches made of it."""

    path: str = knob(
        BUNDLED, f"{BUNDLED} (bundled), a hub name such as openai/gsm8k, or a local folder or file", path=True
    )
    name: str = knob(
        "main", "the data set's configuration on the hub, its subfolder on disk; empty: its only one", path=True
    )
    split: str = knob("train", "split, optionally with a slice: train[:100]")
    type: str = knob("gsm8k", "how rows are read: gsm8k, messages, or a format of docs/data_formats.md")
    options: dict[str, Any] = knob(factory=dict, meaning="field names and format strings that the type takes")
    sources: list[SourceConfig] = knob(factory=list, meaning="several data sets to mix, in place of path")
    instruction: str = knob("", "type=gsm8k: appended to every question, such as an order to end with '#### N'")
    max_length: int | None = knob(
        None,
        "rows over this many tokens are skipped (RL: the prompt; SFT, preferences: with the answer)",
        least=1,
        most=MAX_COUNT,
    )
    batch_size: int = knob(
        32, "rows per step, over all ranks; a pair of completions is one row", least=1, most=MAX_COUNT
    )
    shuffle: bool = knob(True, "draw a new order every epoch; false keeps the file's order")
    seed: int = knob(0, "seed of the order", least=0, most=MAX_SEED)
    drop_last: bool = knob(True, "leave out an epoch's last batch if it is not full")
    stream: bool = knob(
        False, "read rows when they are needed, from json lines, parquet or the hub, and hold no whole data set"
    )
    shuffle_window: int = knob(
        10_000, "stream=true: rows read ahead and shuffled together; files are shuffled too", least=1, most=MAX_COUNT
    )
    num_workers: int = knob(0, "processes that load rows; 0 loads in the trainer", least=0, most=1024)

    def parts(self) -> list[SourceConfig]:
        """Lists the sources, or the data set itself as the only source.

        Raises:
            UserError: a source has no path or a bad label, two have one label, or only some have a weight.
        """
        if not self.sources:
            return [SourceConfig(self.path, self.name, self.split, self.type, dict(self.options))]
        if nameless := [i for i, source in enumerate(self.sources) if not source.path]:
            raise UserError(f"sources[{nameless[0]}] has no path; give a hub name, a file or a folder")
        weights = [source.weight for source in self.sources]
        if not all(0 <= weight < float("inf") for weight in weights) or len({weight > 0 for weight in weights}) > 1:
            raise UserError(f"sources have the weights {weights}; give each a weight above 0, or give no weights")
        self.labels()
        return self.sources

    def labels(self) -> list[str]:
        """Names of the sources in metrics and messages, all different. Paths that end alike are numbered.

        Raises:
            UserError: a label is given twice, or has other characters than letters, digits, `.`, `_` and `-`.
        """
        given = [source.label for source in self.sources if source.label]
        for label in given:
            if not LABEL.fullmatch(label):
                raise UserError(
                    f"sources have the label {shown(label)!r}; use 1 to 64 letters, digits, '.', '_' or '-'"
                )
            if given.count(label) > 1:
                raise UserError(
                    f"sources have the label {label!r} {given.count(label)} times; give each a label of its own"
                )
        labels: list[str] = []
        for source in self.sources:
            label = source.label or _label_of(source.path)
            number = 2
            while not source.label and label in (*given, *labels):
                label, number = f"{_label_of(source.path)}-{number}", number + 1
            labels.append(label)
        return labels or [_label_of(self.path)]

    def describe(self) -> str:
        """Joins the paths, for messages."""
        return " + ".join(part.path for part in self.parts())


def _label_of(path: str) -> str:
    """Returns the last part of a path without its suffix: `data/math.jsonl` is `math`."""
    stem = path.rstrip("/").rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^\w-]", "_", stem)[:48] or "data"
