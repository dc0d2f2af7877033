"""Finds rows to train on that share text with held-out rows: the same words, `n` in a row.

An n-gram of words, without case and punctuation, is GPT-3's measure with n = 13 (Brown et al.,
https://arxiv.org/abs/2005.14165, appendix C). Memory holds the held-out rows' n-grams, 12 bytes each. Rows to train on
are streamed past them, so their number does not matter. A match of hashes counts once the words themselves are equal.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megarl.data.config import DataConfig
from megarl.data.mixture import Mixture
from megarl.data.prepare import BAR_FROM_ROWS, LISTED
from megarl.data.stream import RowStream, StreamMixture
from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker

logger = logging.getLogger("megarl.data")

MAX_NGRAMS = 2**24  # of the held-out rows: 200 MB
COMMON_SHARE, COMMON_ROWS = 0.05, 3  # n-grams in more held-out rows than both limits count as instructions or templates
WORD = re.compile(r"\w+")
BASE = np.uint64(0x9E3779B97F4A7C15)  # an odd number: powers of it spread over all bits


class HeldOut:
    """The n-grams of held-out rows, and the rows that they stand in."""

    def __init__(self, texts: Sequence[str], n: int):
        """Row i has the text `texts[i]`. A text of fewer than n words is matched by an equal text alone.

        Raises:
            UserError: the rows have more than `MAX_NGRAMS` n-grams.
        """
        self.n, self.texts = n, texts
        self._short: dict[tuple[str, ...], int] = {}
        hashes: list[NDArray[np.uint64]] = []
        owners: list[NDArray[np.int32]] = []
        for row, text in enumerate(texts):
            words = words_of(text)
            if 0 < len(words) < n:
                self._short.setdefault(tuple(words), row)
            found = np.unique(ngram_hashes(words, n))
            hashes.append(found)
            owners.append(np.full(len(found), row, np.int32))
        joined = np.concatenate([*hashes, np.empty(0, np.uint64)])
        if len(joined) > MAX_NGRAMS:
            raise UserError(
                f"data.decontaminate: the held-out rows have {len(joined)} runs of {n} words, at most {MAX_NGRAMS} are "
                "held; check against a part of them, such as valid_dataset.split=test[:10000]"
            )
        self._hashes, first, counts = np.unique(joined, return_index=True, return_counts=True)
        self._owners = np.concatenate([*owners, np.empty(0, np.int32)])[first]
        distinctive = counts <= max(COMMON_ROWS, COMMON_SHARE * len(texts))
        self._hashes, self._owners = self._hashes[distinctive], self._owners[distinctive]

    def overlap(self, text: str) -> tuple[int, str] | None:
        """Returns the held-out row that the text shares n words with, and these words; None if there is none."""
        words = words_of(text)
        if len(words) < self.n:
            row = self._short.get(tuple(words))
            return None if row is None else (row, " ".join(words))
        found = ngram_hashes(words, self.n)
        places = np.searchsorted(self._hashes, found)
        places[places == len(self._hashes)] = 0
        for at in np.flatnonzero(self._hashes[places] == found) if len(self._hashes) else ():
            row, shared = int(self._owners[places[at]]), words[at : at + self.n]
            if shared in windows(words_of(self.texts[row]), self.n):
                return row, " ".join(shared)
        return None


def decontaminated(dataset: Any, held_out: Any, tokenizer: Any, config: DataConfig) -> Any:
    """Reports or drops the rows of `dataset` that overlap with held-out rows, by `data.decontaminate`.

    A stream is checked as it is read.

    Raises:
        UserError: every row overlaps, and all would be dropped.
    """
    if config.decontaminate == "off":
        return dataset
    known = HeldOut([text_of(row, tokenizer) for row in held_out], config.decontaminate_words)
    if isinstance(dataset, StreamMixture | RowStream):
        for label, part in _streams(dataset):
            part.keep = _Watch(known, label, tokenizer, config.decontaminate == "drop")
        return dataset
    if isinstance(dataset, Mixture):
        parts = zip(dataset.labels, dataset.parts, strict=True)
        return dataset.with_parts([_checked(part, label, known, tokenizer, config) for label, part in parts])
    return _checked(dataset, "", known, tokenizer, config)


def _streams(dataset: StreamMixture | RowStream) -> Iterator[tuple[str, RowStream]]:
    if isinstance(dataset, RowStream):
        yield "", dataset
    else:
        yield from zip(dataset.labels, dataset.parts, strict=True)


def _checked(rows: Any, label: str, known: HeldOut, tokenizer: Any, config: DataConfig) -> Any:
    found: list[tuple[int, int, str]] = []
    for number, row in enumerate(tqdm(rows, "decontaminating", disable=len(rows) < BAR_FROM_ROWS)):
        if overlap := known.overlap(text_of(row, tokenizer)):
            found.append((number, *overlap))
    of = f"{len(rows)} rows" + (f" of {label}" if label else "")
    dropped = config.decontaminate == "drop"
    if not found:
        logger.warning("decontamination: none of %s shares %d words with a held-out row", of, known.n)
        return rows
    listed = "; ".join(_named(*hit) for hit in found[:LISTED])
    more = f"; and {len(found) - LISTED} more" if len(found) > LISTED else ""
    line = f"decontamination: {len(found)} of {of} share {known.n} words with held-out rows"
    if dropped and len(found) == len(rows):
        raise UserError(f"{line}: {listed}{more}; none would be left, so give other data or set data.decontaminate=off")
    logger.warning("%s%s: %s%s", line, " and are dropped" if dropped else "", listed, more)
    if not dropped:
        return rows
    bad = {number for number, _, _ in found}
    kept = [number for number in range(len(rows)) if number not in bad]
    return [rows[number] for number in kept] if isinstance(rows, list) else rows.select(kept)


def _named(number: int, held_out: int, words: str) -> str:
    return f"row {number} with held-out row {held_out} ({words!r})"


class _Watch:
    """Checks the rows of a stream. Counts overlaps as `data/overlapping_rows`, and names the first ones."""

    def __init__(self, known: HeldOut, label: str, tokenizer: Any, drop: bool):
        self.known, self.label, self.tokenizer, self.drop = known, label, tokenizer, drop
        self._named = 0

    def __call__(self, number: int, row: Mapping[str, Any]) -> bool:
        overlap = self.known.overlap(text_of(row, self.tokenizer))
        if overlap is None:
            return True
        stats_tracker.total(**{"data/overlapping_rows": 1})
        self._named += 1
        if self._named <= LISTED:
            of = f" of {self.label}" if self.label else ""
            done = ", and is dropped" if self.drop else ""
            logger.warning("decontamination: %s overlap%s%s", _named(number, *overlap), of, done)
        return not self.drop


def text_of(row: Mapping[str, Any], tokenizer: Any) -> str:
    """Returns a row's text: its messages, or its token ids as text; of a preference the prompt alone."""
    if "messages" in row:
        return "\n".join(message["content"] for message in row["messages"])
    ids = row["input_ids"] if "input_ids" in row else row["prompt_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def words_of(text: str) -> list[str]:
    """Splits a text into words, in lower case and without punctuation."""
    return WORD.findall(text.lower())


def windows(words: Sequence[str], n: int) -> Iterator[Sequence[str]]:
    """Yields every run of n words."""
    return (words[start : start + n] for start in range(len(words) - n + 1))


def ngram_hashes(words: Sequence[str], n: int) -> NDArray[np.uint64]:
    """Hashes every run of n words, `[max(len(words) - n + 1, 0)]`: a polynomial in the words' hashes modulo 2^64."""
    if len(words) < n:
        return np.empty(0, np.uint64)
    hashes = np.array([_word_hash(word) for word in words], np.uint64)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(n, BASE))
        return (np.lib.stride_tricks.sliding_window_view(hashes, n) * powers).sum(axis=1, dtype=np.uint64)


@functools.lru_cache(maxsize=2**18)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
