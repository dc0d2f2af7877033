"""Reads data sets of any size row by row: nothing but a window of rows is held, and a resume goes on at the next row.

    files or hub -> windows of rows, shuffled -> converted -> usable rows -> StreamBatches (collate.py)

A window is read, shuffled with a seed of its own, and given out. So the state is small: the reader's position before
the window, and the number of rows given out of it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import httpx
from datasets import IterableDataset

from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.prepare import LISTED, BadRow
from megarl.data.sources import open_rows
from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.types import ORIGIN

logger = logging.getLogger("megarl.data")

READING_ERRORS = (OSError, EOFError, ValueError, datasets.exceptions.DatasetGenerationError, httpx.TransportError)
CHECKED = 100  # rows that are converted before the run starts, so that a wrong format is found then


@dataclass(frozen=True)
class Conversion:
    """Makes a row to train on of a raw one."""

    convert: Callable[[int, dict[str, Any]], dict[str, Any]]  # of its number and values; raises BadRow
    length: Callable[[Mapping[str, Any]], int]  # tokens that `max_length` bounds
    what: str  # name of the rows, such as "prompts"


class RowStream:
    """Endless rows of one source, epoch after epoch. Rows that do not fit, or are too long, are left out.

    The order is a function of the seed and the epoch: files are shuffled, then the rows of each window.
    """

    def __init__(self, source: SourceConfig, config: DatasetConfig, conversion: Conversion, on_bad_row: str):
        """Converts the first rows.

        Raises:
            UserError: the source cannot be streamed, is empty, or its first rows do not fit.
        """
        self.source, self.conversion, self.on_bad_row = source, conversion, on_bad_row
        self.shuffle, self.seed = config.shuffle, config.seed
        self.window_rows, self.max_length = config.shuffle_window if config.shuffle else 1000, config.max_length
        self.keep: Callable[[int, Mapping[str, Any]], bool] = lambda number, row: True
        self.first_rows: list[dict[str, Any]] = []
        self._begin(0)
        self._check_first_rows()
        self._begin(0)
        self._warned = 0

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._reader: IterableDataset = open_rows(
            self.source.path, self.source.split, self.source.name, self._rng(0) if self.shuffle else None
        )
        self._raw: Iterator[dict[str, Any]] = iter(self._reader)
        self._window: list[dict[str, Any]] = []
        self._order: list[int] = []
        self._at = 0  # rows given out of the window
        self._first = 0  # number, within the epoch, of the window's first row
        self._before: dict[str, Any] = self._reader.state_dict()  # position at the window's first row
        self._used = 0  # rows of this epoch that could be used
        self._fill()

    def _rng(self, position: int) -> random.Random:
        return random.Random(f"{self.seed} {self.epoch} {position}")

    def _fill(self) -> None:
        """Reads the next window; it is empty at the end of the epoch."""
        self._first += len(self._window)
        self._before = self._reader.state_dict()
        try:
            self._window = [row for _, row in zip(range(self.window_rows), self._raw, strict=False)]
        except READING_ERRORS as error:
            raise UserError(f"{self.source.path} cannot be read after row {self._first} ({error})") from error
        self._order = list(range(len(self._window)))
        if self.shuffle:
            self._rng(self._first + 1).shuffle(self._order)
        self._at = 0

    def _next_raw(self) -> tuple[int, dict[str, Any]]:
        if self._at == len(self._window):
            self._fill()
        if not self._window:
            if not self._used:
                raise UserError(
                    f"{self.source.path} ({self.source.split}) has no usable row in a whole epoch; see the warnings "
                    "above, raise max_length or mend the rows"
                )
            self._begin(self.epoch + 1)
        place = self._order[self._at]
        self._at += 1
        return self._first + place, self._window[place]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        while True:
            number, raw = self._next_raw()
            try:
                row = self.conversion.convert(number, raw)
            except BadRow as error:
                self._skip(number, f"does not fit the type {self.source.type}: {error}", self.on_bad_row == "error")
                continue
            length = self.conversion.length(row)
            if self.max_length is not None and length > self.max_length:
                self._skip(number, f"has {length} tokens, over max_length {self.max_length}", fatal=False)
            elif self.keep(number, row):
                self._used += 1
                return row

    def _skip(self, number: int, why: str, fatal: bool) -> None:
        text = f"row {number} of {self.source.path} ({self.source.split}) {why}"
        if fatal:
            raise UserError(f"{text}; fix it, or skip such rows with data.on_bad_row=skip")
        stats_tracker.total(**{"data/skipped_rows": 1})
        self._warned += 1
        if self._warned <= LISTED:
            last = "; further ones are counted alone, as data/skipped_rows" if self._warned == LISTED else ""
            logger.warning("%s, and is skipped%s", text, last)

    def _check_first_rows(self) -> None:
        if not self._window:
            raise UserError(f"data set {self.source.path} ({self.source.split}) is empty: it holds no rows")
        bad: list[str] = []
        lengths: list[int] = []
        for number, raw in enumerate(self._window[:CHECKED]):
            try:
                row = self.conversion.convert(number, raw)
            except BadRow as error:
                bad.append(f"row {number}: {error}")
                continue
            lengths.append(self.conversion.length(row))
            if self.max_length is None or lengths[-1] <= self.max_length:
                self.first_rows.append(row)
        checked = min(CHECKED, len(self._window))
        if bad and (self.on_bad_row == "error" or len(bad) == checked):
            raise UserError(
                f"{len(bad)} of the first {checked} rows of {self.source.path} ({self.source.split}) do not fit the "
                f"type {self.source.type}: {'; '.join(bad[:LISTED])}; fix them, or skip them with data.on_bad_row=skip"
            )
        if not self.first_rows:
            raise UserError(
                f"the first {len(lengths)} {self.conversion.what} of {self.source.path} ({self.source.split}) are all "
                f"over max_length {self.max_length} (the shortest has {min(lengths)} tokens); raise max_length"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream."""
        position = {"epoch": self.epoch, "first": self._first, "at": self._at, "used": self._used}
        return {**position, "reader": self._before, "window_rows": self.window_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of `state`, and reads its window again.

        Raises:
            UserError: the window's size differs.
        """
        if state["window_rows"] != self.window_rows:
            raise UserError(
                f"cannot resume the data order: shuffle_window was {state['window_rows']} at the checkpoint and is "
                f"{self.window_rows} now; resume with the same data settings"
            )
        self._begin(state["epoch"])
        self._reader.load_state_dict(state["reader"])
        self._raw, self._window, self._first = iter(self._reader), [], state["first"]
        self._fill()
        self._before = state["reader"]  # until it yields a row, a moved reader reports its old position
        self._at, self._used = state["at"], state["used"]


class StreamMixture:
    """Several streams mixed. The source of each row is drawn with a probability proportional to its weight.

    Draw n depends on the seed and n alone. Rows carry their origin, as in `mixture.Origins`.
    """

    def __init__(self, parts: Sequence[RowStream], weights: Sequence[float], labels: Sequence[str], seed: int):
        self.parts, self.weights, self.labels, self.seed = list(parts), list(weights), list(labels), seed
        self._drawn = 0

    @property
    def first_rows(self) -> list[dict[str, Any]]:
        """The first rows of every stream."""
        return [row for part in self.parts for row in part.first_rows]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} draw {self._drawn}")
        (number,) = draw.choices(range(len(self.parts)), self.weights)
        try:
            row = next(self.parts[number])
        except UserError as error:
            raise UserError(f"source {self.labels[number]}: {error}") from error
        self._drawn += 1
        return {**row, ORIGIN: {"source": self.labels[number], "row": self._drawn - 1}}

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of draws, and the position in each stream."""
        return {"drawn": self._drawn, "labels": self.labels, "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves every stream to its position in `state`.

        Raises:
            UserError: the sources differ.
        """
        if state["labels"] != self.labels:
            raise UserError(
                f"cannot resume the data order: the sources were {', '.join(state['labels'])} at the checkpoint and "
                f"are {', '.join(self.labels)} now; resume with the same sources"
            )
        for part, position in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(position)
        self._drawn = state["drawn"]
