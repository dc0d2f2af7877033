"""Mixes data sets by weights, and keeps for each row which source it came from.

sources  ->  Mixture  ->  Origins (rows with source and number)  ->  Batches  ->  metrics data/LABEL/...
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.stream import RowStream, StreamMixture
from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.types import ORIGIN, Episode, rewards_of_samples

Counts = dict[str, tuple[int, int]]  # by label: rows and tokens


class Mixture:
    """Several data sets mixed into one. In an epoch, each has a share of the rows proportional to its weight.

    An epoch is long enough to contain every row of every data set. A data set too short for its share starts again.
    Without weights every row occurs once. Rows of a data set stay in order; `Batches` shuffles.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], labels: Sequence[str]):
        self.parts, self.weights, self.labels = list(parts), list(weights), list(labels)
        counts = [len(part) for part in parts]
        if any(weights):
            longest = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
            counts = [max(len(part), round(longest * w)) for part, w in zip(parts, weights, strict=True)]
        self.starts = [0, *itertools.accumulate(counts)]
        self._first = [0, *itertools.accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the number of the data set behind an index, and the row in it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self.starts, index) - 1
        return number, (index - self.starts[number]) % len(self.parts[number])

    def __getitem__(self, index: int) -> Any:
        number, row = self.locate(index)
        return self.parts[number][row]

    @property
    def distinct(self) -> int:
        """Number of rows, each counted once."""
        return self._first[-1]

    def origin(self, index: int) -> dict[str, Any]:
        """Returns the label of the row's source, and the row's number among all distinct rows."""
        number, row = self.locate(index)
        return {"source": self.labels[number], "row": self._first[number] + row}

    def identity(self) -> str:
        """Names each source with its rows and weight, such as `math 900 x 2`, for checkpoints."""
        sources = zip(self.labels, self.parts, self.weights, strict=True)
        return ", ".join(f"{label} {len(part)} x {weight:g}" for label, part, weight in sources)

    def with_parts(self, parts: Sequence[Any]) -> Mixture:
        """Mixes other data sets by the weights of these."""
        return Mixture(parts, self.weights, self.labels)


def read_sources(config: DatasetConfig, read: Callable[[int, SourceConfig], Any]) -> Any:
    """Reads every source with `read(number, source)` and mixes them. A single one is returned unchanged.

    Raises:
        UserError: a source cannot be read or is empty; with several, the message begins with its label.
    """
    sources, labels = config.parts(), config.labels()
    if len(sources) == 1:
        return read(0, sources[0])
    parts = []
    for number, (source, label) in enumerate(zip(sources, labels, strict=True)):
        try:
            parts.append(read(number, source))
        except UserError as error:
            raise UserError(f"source {label}: {error}") from error
        if not config.stream and len(parts[-1]) == 0:
            raise UserError(f"source {label}: {source.path} has no row left to use; leave the source out")
    weights = [source.weight for source in sources]
    return StreamMixture(parts, weights, labels, config.seed) if config.stream else Mixture(parts, weights, labels)


def column_sets(dataset: Any) -> dict[str, set[str]]:
    """Returns the columns of each source by its label. A single data set has the label ""."""
    if isinstance(dataset, Mixture | StreamMixture):
        return {
            label: columns
            for label, part in zip(dataset.labels, dataset.parts, strict=True)
            for columns in column_sets(part).values()
        }
    if isinstance(dataset, RowStream):
        dataset = dataset.first_rows
    names = getattr(dataset, "column_names", None)
    return {"": set(names) if names is not None else set.intersection(*(set(row) for row in dataset))}


def source_labels(dataset: Any) -> list[str]:
    """Returns the label of each row's source; [] if the data set is no mixture."""
    return [dataset.origin(index)["source"] for index in range(len(dataset))] if isinstance(dataset, Mixture) else []


class Origins:
    """A data set whose rows carry their origin: `ORIGIN: {"source": label, "row": number}`.

    Rows of a mixture are numbered over all its data sets. A row that a mixture repeats has one number.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.distinct: int = dataset.distinct if isinstance(dataset, Mixture) else len(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        mixed = isinstance(self.dataset, Mixture)
        origin = self.dataset.origin(index) if mixed else {"source": "", "row": index}
        return {**self.dataset[index], ORIGIN: origin}


class Counted:
    """A `collate_fn` that takes the origins off the rows: gives the batch, and rows and tokens of each source."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]):
        self.collate_fn = collate_fn

    def __call__(self, rows: list[Any]) -> tuple[Any, Counts]:
        counts: Counts = {}
        for row in rows:
            label = row[ORIGIN]["source"]
            tokens = sum(len(value) for name, value in row.items() if name.endswith("_ids"))
            before = counts.get(label, (0, 0))
            counts[label] = before[0] + 1, before[1] + tokens
        return self.collate_fn([{k: v for k, v in row.items() if k != ORIGIN} for row in rows]), counts


def record_episodes(labels: Sequence[str], episodes: Sequence[Episode]) -> None:
    """Records what a batch's prompts of each source gave, as `data/LABEL/...`.

    They are `share` of the batch's prompts, `reward` and `length` (trained tokens) as means over samples, and
    `rejected` prompts.
    """
    taken = [episode for episode in episodes if episode.group is not None]
    for label in labels:
        groups = [e.group for e in taken if e.group is not None and e.origin.get("source") == label]
        rejected = sum(e.group is None and e.origin.get("source") == label for e in episodes)
        samples = sum(group.num_samples for group in groups)
        with stats_tracker.scope("data"), stats_tracker.scope(label):
            stats_tracker.scalar(share=len(groups) / max(len(taken), 1), rejected=rejected)
            if samples:
                rewards = sum(float(rewards_of_samples(group).sum()) for group in groups)
                tokens = sum(int(group["loss_mask"].sum()) for group in groups)
                stats_tracker.rate(reward=(rewards, samples), length=(tokens, samples))


def record_counts(labels: Sequence[str], counts: Mapping[str, tuple[int, int]]) -> None:
    """Records `data/LABEL/share` of the batch's rows, and `data/LABEL/length`, the mean tokens of a row."""
    total = sum(rows for rows, _ in counts.values())
    for label in labels:
        rows, tokens = counts.get(label, (0, 0))
        with stats_tracker.scope("data"), stats_tracker.scope(label):
            stats_tracker.scalar(share=rows / total)
            if rows:
                stats_tracker.rate(length=(tokens, rows))
