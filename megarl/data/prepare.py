"""Prepares rows for training: reports rows that do not fit, caches results, drops long rows and mixes data sets.

The cache lies in `megarl/prepared`, next to the bundled data. Its key is a hash of the rows, the tokenizer, the
settings and this package's source. A second start therefore only memory-maps a file, and stale results are never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import filelock
import pyarrow as pa
from datasets import Dataset, Features

from megarl.data.arithmetic import cache_folder
from megarl.data.config import SourceConfig
from megarl.knobs import UserError

logger = logging.getLogger("megarl.data")

BAR_FROM_ROWS = 20_000  # fewer rows take only a few seconds and get no progress bar
PREPARING_S = 24 * 3600.0  # longest wait for another process that prepares the same data
LISTED = 20  # bad rows in the message; with more, a file lists all
PROBLEM = "problem"
JSON = "json"  # the only column of rows read from json files: their text
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FIELDS = {"role": "role", "content": "content"}  # keys of a message


class BadRow(ValueError):
    """A row that does not fit its format: the field, its value, and the value that was expected."""

    def __init__(self, field: str, value: Any, expected: str):
        text = "missing or null" if value is None else repr(value)
        super().__init__(f"{field} is {text if len(text) <= 80 else text[:77] + '...'}; {expected}")


def parsed(values: dict[str, Any]) -> Any:
    """Parses a row of `load_rows`. Raises `BadRow` if it is text that is not JSON, or has text that is not Unicode."""
    if list(values) != [JSON]:
        return values
    try:
        row = json.loads(values[JSON])
        if "\\ud" in values[JSON].lower():  # perhaps half of a surrogate pair, which no tokenizer takes
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRow("the row", values[JSON], f"expected JSON ({error})") from error
    return row


class Row:
    """A row, read by field. Every reader raises `BadRow` if the value does not fit."""

    def __init__(self, values: Any):
        if not isinstance(values, dict):
            raise BadRow("the row", values, "expected an object")
        self.values = values

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def text(self, field: str) -> str:
        """Returns the text in a field."""
        value = self.values.get(field)
        if not isinstance(value, str):
            raise BadRow(field, value, "expected text")
        return value

    def optional_text(self, field: str) -> str:
        """Returns the text in a field, or an empty string if the field is missing."""
        return self.text(field) if self.has(field) else ""

    def messages(self, field: str, mapping: dict[str, str], roles: dict[str, str]) -> list[dict[str, str]]:
        """Returns the messages in a field, at least one, as `{"role", "content"}` with the template's role names.

        `mapping` has the keys of a message's role and content. `roles` maps the data's role names to the template's.
        """
        value = self.values.get(field)
        if not isinstance(value, list) or not value:
            raise BadRow(field, value, "expected a list of messages")
        return [message_of(message, f"{field}[{i}]", mapping, roles) for i, message in enumerate(value)]


def message_of(value: Any, where: str, mapping: dict[str, str], roles: dict[str, str]) -> dict[str, str]:
    """Converts a message to `{"role", "content"}`. Raises `BadRow` if it does not fit."""
    if not isinstance(value, dict):
        raise BadRow(where, value, f"expected an object with {mapping['role']!r} and {mapping['content']!r}")
    role, content = value.get(mapping["role"]), value.get(mapping["content"])
    if not isinstance(role, str) or role not in roles:
        raise BadRow(f"{where}.{mapping['role']}", role, f"expected one of {', '.join(roles)}")
    if not isinstance(content, str):
        raise BadRow(f"{where}.{mapping['content']}", content, "expected text")
    return {"role": roles[role], "content": content}


def convert_rows(
    rows: Dataset,
    convert: Callable[[int, dict[str, Any]], dict[str, Any]],
    features: Features,
    identity: Sequence[Any],
    source: SourceConfig,
    on_bad_row: str,
) -> Dataset:
    """Calls `convert(index, row)` on every row and caches the results. Rows that raise `BadRow` are reported.

    Args:
        rows: Rows of `load_rows`.
        convert: Makes one result from the row's index and values.
        features: Columns of the results.
        identity: JSON values of everything that `convert` depends on besides the row, for the cache's key.
        source: The data set, for messages.
        on_bad_row: "error", or "skip" to leave bad rows out.

    Raises:
        UserError: rows do not fit and `on_bad_row` is error, or no row fits.
    """

    def attempt(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            return {**convert(index, dict(row)), PROBLEM: None}
        except BadRow as error:
            return {**dict.fromkeys(features), PROBLEM: str(error)}

    key = [source.type, source.options, *identity]
    done = cached_map(rows, attempt, Features({**features, PROBLEM: datasets.Value("string")}), key, "preparing data")
    problems = done.data.column(PROBLEM)
    bad = (
        [i for i, flag in enumerate(problems.is_valid().to_pylist()) if flag] if problems.null_count < len(done) else []
    )
    if bad:
        report([(i, problems[i].as_py()) for i in bad], len(done), source, on_bad_row)
        skipped = set(bad)
        done = done.select([i for i in range(len(done)) if i not in skipped])
    return done.remove_columns(PROBLEM)


def report(bad: list[tuple[int, str]], total: int, source: SourceConfig, on_bad_row: str) -> None:
    """Warns of bad rows (index and problem), or raises. If they are many, a file lists all of them.

    Raises:
        UserError: `on_bad_row` is error, or no row fits.
    """
    listed = "; ".join(f"row {i}: {problem}" for i, problem in bad[:LISTED])
    if len(bad) > LISTED:
        text = "".join(f"row {i}: {problem}\n" for i, problem in bad)
        file = cache_folder("bad_rows") / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        listed += f"; all {len(bad)} are listed in {file}"
    where = f"{len(bad)} of {total} rows of {source.path} ({source.split}) do not fit the type {source.type}"
    if len(bad) == total:
        raise UserError(f"{where}: {listed}")
    if on_bad_row == "error":
        raise UserError(f"{where}: {listed}; fix them, or skip them with data.on_bad_row=skip")
    logger.warning("%s and were skipped: %s", where, listed)


def cached_map(
    rows: Dataset, function: Callable[..., dict[str, Any]], features: Features, identity: Sequence[Any], what: str
) -> Dataset:
    """Calls `function(row, index)` on every row, or reads the results from the cache. `what` titles the progress bar.

    The results have the columns `features`. `identity` holds JSON values of all that `function` depends on.
    """
    key = hashlib.blake2b(digest_size=16)
    for part in (_source_hash(), content_hash(rows), json.dumps(list(identity), sort_keys=True), repr(features)):
        key.update(part.encode() + b"\0")
    folder = cache_folder("prepared")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{key.hexdigest()}.arrow"
        with _alone(file), progress_bars(len(rows) >= BAR_FROM_ROWS):
            return rows.map(
                function, with_indices=True, remove_columns=rows.column_names, features=features, desc=what,
                cache_file_name=str(file), new_fingerprint=key.hexdigest(), load_from_cache_file=True,
            )  # fmt: skip
    except OSError as error:
        raise UserError(
            f"prepared data cannot be written to {folder} ({error.strerror or error}); set XDG_CACHE_HOME to a folder "
            "that you may write"
        ) from error


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Lets one process of this machine at a time make the file, such as one of a node's ranks that start together.

    The lock lies in the machine's own folder: the kernel frees it when its holder ends, which network file systems may
    not.

    Raises:
        UserError: it cannot be had, or another process has it for `PREPARING_S`.
    """
    if file.is_file():
        yield
        return
    path = Path(tempfile.gettempdir()) / f"megarl-{os.getuid()}-{file.stem}.lock"
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=PREPARING_S)
    except filelock.Timeout as error:
        raise UserError(
            f"another process of this machine has prepared the same data for {PREPARING_S / 3600:g} hours; end it, or "
            f"remove {path}"
        ) from error
    except OSError as error:
        raise UserError(
            f"the lock {path} cannot be made ({error.strerror or error}); set TMPDIR to a folder that you may write"
        ) from error
    try:
        yield
    finally:
        lock.release()


class _Hashing:
    """File-like sink that hashes the bytes written to it."""

    closed = False

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def content_hash(rows: Dataset) -> str:
    """Hashes the values of a data set, independent of the file that they were read from."""
    sink = _Hashing()
    for part in rows.with_format("arrow").iter(10_000):
        with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), part.schema) as writer:
            writer.write_table(part)
    return sink.hash.hexdigest()


def tokenizer_identity(tokenizer: Any) -> str:
    """Hashes everything that decides how a tokenizer turns text and chats into ids."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for state in ("truncation", "padding"):  # left over from its last use
        backend.pop(state, None)
    parts = [
        type(tokenizer).__name__,
        backend,
        tokenizer.chat_template,
        {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _source_hash() -> str:
    """Hashes this package's source, so that a change of the code prepares the data again."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"\0".join(f.read_bytes() for f in files), digest_size=16).hexdigest()


def keep_within(dataset: Any, lengths: list[int], max_length: int | None, what: str) -> Any:
    """Drops rows over `max_length` tokens, with a warning that lists their index and length. `what` names the rows."""
    if max_length is None:
        return dataset
    skipped = [(i, n) for i, n in enumerate(lengths) if n > max_length]
    if not skipped:
        return dataset
    if len(skipped) == len(dataset):
        raise UserError(
            f"all {len(dataset)} {what} are over max_length {max_length} (the shortest has {min(lengths)} tokens); "
            "raise max_length"
        )
    listed = ", ".join(f"row {i} ({n} tokens)" for i, n in skipped)
    logger.warning(
        "%d of %d %s over max_length %d were skipped: %s", len(skipped), len(dataset), what, max_length, listed
    )
    kept = [i for i, n in enumerate(lengths) if n <= max_length]
    return [dataset[i] for i in kept] if isinstance(dataset, list) else dataset.select(kept)


def lengths_of(dataset: Dataset, column: str = "input_ids") -> list[int]:
    """Returns the length of each row's list in a column."""
    batches = dataset.select_columns([column]).with_format("arrow").iter(10_000)
    return [n for batch in batches for n in batch.column(column).combine_chunks().value_lengths().to_pylist()]


@contextlib.contextmanager
def progress_bars(show: bool) -> Iterator[None]:
    """Hides the progress bars of `datasets` inside the block unless `show` is true."""
    if show or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
