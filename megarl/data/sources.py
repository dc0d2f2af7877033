"""Loads rows from the hub, from disk or from a bundled generator. A local path takes precedence over the hub."""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import fsspec
import httpx
import pyarrow as pa
from datasets import Dataset, IterableDataset, ReadInstruction, load_dataset
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from megarl.data.arithmetic import cache_folder, generate, write_arithmetic
from megarl.data.arithmetic_pairs import generate_judged, generate_pairs
from megarl.data.config import BUNDLED, BUNDLED_JUDGED, BUNDLED_PAIRS, HUB_NAME
from megarl.data.prepare import JSON, logger, progress_bars
from megarl.knobs import UserError

GENERATORS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    BUNDLED: generate,
    BUNDLED_PAIRS: generate_pairs,
    BUNDLED_JUDGED: generate_judged,
}
FILE_TYPES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
HUB_TIMEOUT_S = 10.0
MAX_NESTING = 200  # of lists and objects in each other; Arrow's reader of JSON ends the process at some 20,000
JSON_STRING = rb'"((?:[^"\\]|\\.)*)"'
NULL_ROW = re.compile(rb"(\xef\xbb\xbf)?\s*null\b")
BAR_FROM_BYTES = 20_000_000  # smaller files take about a second and get no progress bar


def load_table(path: str, split: str, name: str = "") -> Dataset:
    """Loads the rows of `split` as a table in which each column has one type.

    `path` is a bundled name (`arithmetic`, `arithmetic_pairs`, `arithmetic_judged`), a file, a folder in the hub's
    layout (`main/train-00000-of-00001.parquet`, or parquet, json or jsonl files named by their split), or a hub name
    such as `openai/gsm8k`. `split` may carry a slice: `train[:100]`.

    Raises:
        UserError: the data is not found, cannot be read or is empty.
    """
    files = _local_files(path, split, name)
    return _load_hub(path, name, split) if files is None else _load_files(files, split)


def load_rows(path: str, split: str, name: str = "") -> Dataset:
    """Loads rows as `load_table` does. Rows of json files stay text, in the column `json`.

    They may then differ in shape, and errors can name the bad row. `prepare.parsed` parses the text.
    """
    files = _local_files(path, split, name)
    if files is None:
        return _load_hub(path, name, split)
    if {_kind(f) for f in files} != {"json"}:
        return _load_files(files, split)
    lines = [line for file in files for line in _json_lines(file)]
    if not lines:
        raise UserError(f"data set {path} is empty: {', '.join(map(str, files))} holds no rows")
    try:
        slices = ReadInstruction.from_spec(split).to_absolute({_base(split): len(lines)})
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"split {split!r} is not a split with a slice, such as test[:100]: {one_line(error)}"
        ) from error
    return Dataset.from_dict({JSON: [line for part in slices for line in lines[part.from_ : part.to]]})


def open_rows(path: str, split: str, name: str, order: random.Random | None) -> IterableDataset:
    """Opens rows as `load_rows` gives them, but reads them only when they are needed.

    `order` shuffles the files. The hub's files stay in their order.

    Raises:
        UserError: the data is not found, or cannot be read row by row.
    """
    if split != _base(split):
        raise UserError(
            f"split {split!r} of {path}: stream=true has no end, and a slice needs the number of rows; name a "
            "split alone, or set stream=false"
        )
    files = _local_files(path, split, name)
    if files is None:
        return _hub_rows(path, name, split)
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise UserError(
            f"{', '.join(map(str, files))}: a split's files must all be parquet, or all json or jsonl (.gz is fine)"
        )
    if order is not None:
        order.shuffle(files)
    names = [str(file) for file in files]
    try:
        if kinds == {"parquet"}:
            return load_dataset("parquet", data_files={split: names}, split=split, streaming=True)
        for file in files:
            with fsspec.open(str(file), "rb", compression="infer") as stream:
                if stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                    raise UserError(f"{file} is one JSON array, which stream=true cannot read; write one row per line")
        lines = load_dataset("text", data_files={split: names}, split=split, streaming=True)
        return lines.rename_column("text", JSON).filter(_not_blank)
    except (OSError, EOFError, datasets.exceptions.DatasetGenerationError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)})") from error


def _not_blank(row: dict[str, Any]) -> bool:
    return bool(row[JSON].strip())


def _hub_rows(path: str, name: str, split: str) -> IterableDataset:
    """Opens a data set of the hub as a stream."""
    if unreachable := _why_unreachable(path):
        raise UserError(
            f"data set {path}: {datasets.config.HF_ENDPOINT} cannot be reached ({unreachable}), and stream=true reads "
            "from there as the run goes on; give a local folder or file, or set stream=false to use the cache"
        )
    try:
        return load_dataset(path, name or None, split=split, streaming=True)
    except (ConnectionError, httpx.TransportError, DatasetNotFoundError, HfHubHTTPError, ValueError) as error:
        raise UserError(f"data set {path} ({split}) cannot be streamed ({one_line(error)})") from error


def _local_files(path: str, split: str, name: str) -> list[Path] | None:
    """Finds the files of the split. Returns None for a hub name."""
    if path in GENERATORS:
        return _split_files(write_arithmetic(cache_folder(path), generate=GENERATORS[path]), name, split)
    if (local := Path(path).expanduser()).exists():
        return _split_files(local, name, split) if local.is_dir() else [local]
    if not HUB_NAME.fullmatch(path):
        raise UserError(
            f"data set {path!r} not found: it is neither a local file or folder nor a hub name (owner/name); "
            f"give one of these, or {BUNDLED!r} for the bundled task"
        )
    return None


def _base(split: str) -> str:
    base = re.match(r"\w+", split)
    if base is None:
        raise UserError(f"split {split!r} is not a split name such as train or test[:100]")
    return base.group()


def _kind(file: Path) -> str | None:
    """Returns the loader for a file by its suffix, or None if it is not supported."""
    suffixes = [s for s in file.suffixes if s not in COMPRESSIONS]
    return FILE_TYPES.get(suffixes[-1]) if suffixes else None


def _split_files(folder: Path, name: str, split: str) -> list[Path]:
    """Finds the files named by the split in `folder/name`, else in `folder`, else in `folder/data`."""
    base = _base(split)
    places = [p for p in dict.fromkeys((folder / name, folder, folder / "data")) if p.is_dir()]
    for place in places:
        files = [f for f in sorted(place.iterdir()) if f.is_file() and _kind(f)]
        split_files = [f for f in files if re.fullmatch(rf"{base}([-_.].*)?", f.name)]
        if split_files:
            return split_files
    names = sorted(f"{f.relative_to(folder)}" for p in places for f in p.iterdir() if not f.name.startswith("."))
    expected = f"{name}/{base}-00000-of-00001.parquet" if name else f"{base}-00000-of-00001.parquet"
    raise UserError(
        f"no file of the split {base!r} in {folder}; it holds {names[:20] or 'nothing'}; expected "
        f"{expected} or {base}.parquet, .json or .jsonl"
    )


def _load_files(files: list[Path], split: str) -> Dataset:
    """Reads files of one type as the split. A file that the path names directly counts as the split."""
    kinds = {_kind(f) for f in files}
    if len(kinds) > 1 or None in kinds:
        raise UserError(
            f"{', '.join(map(str, files))}: a split's files must all be parquet, or all json or jsonl (.gz is fine)"
        )
    if any(f.stat().st_size == 0 for f in files):
        raise UserError(f"data set {', '.join(str(f) for f in files)} is empty: a file has 0 bytes")
    if kinds == {"json"}:
        for file in files:
            _check_json(file)
    with progress_bars(sum(f.stat().st_size for f in files) >= BAR_FROM_BYTES):
        try:
            dataset = load_dataset(kinds.pop(), data_files={_base(split): [str(f) for f in files]}, split=split)
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
            raise UserError(f"{', '.join(map(str, files))} cannot be read ({one_line(error)})") from error
    return _decodable(dataset, ", ".join(map(str, files)))


def _decodable(dataset: Dataset, source: str) -> Dataset:
    """Returns the data set, or refuses text that is not UTF-8: Arrow's reader of JSON takes it, Python does not."""
    try:
        dataset.data.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UserError(f"{source} has text that is not UTF-8 ({one_line(error)}); write it as UTF-8") from error
    return dataset


def _check_json(file: Path) -> None:
    """Refuses what Arrow's reader of JSON cannot take: null rows and deep nesting end the process, NUL ends a name."""
    is_array = False
    try:
        with fsspec.open(str(file), "rb", compression="infer") as stream:
            for number, line in enumerate(stream, 1):
                is_array = is_array or (number == 1 and line.startswith((b"[", codecs.BOM_UTF8 + b"[")))
                if line.count(b"[") + line.count(b"{") > MAX_NESTING and _nesting(line) > MAX_NESTING:
                    raise UserError(
                        f"{file}, line {number}: lists and objects nest {_nesting(line)} deep; at most {MAX_NESTING} "
                        "are read, so remove or flatten that value"
                    )
                if NULL_ROW.match(line) and not is_array:
                    raise UserError(f"{file}, line {number}: the row is null; remove it")
                if b"\\u0000" in line and _has_nul_in_a_name(line):
                    raise UserError(
                        f"{file}, line {number}: a name has the character \\u0000, at which Arrow ends it; rename it"
                    )
        if is_array:
            _check_array(file)
    except (OSError, EOFError) as error:
        raise UserError(f"{file} cannot be read ({one_line(error)})") from error


def _check_array(file: Path) -> None:
    """Refuses a file of one JSON array that has a null row."""
    try:
        with fsspec.open(str(file), "rt", compression="infer", encoding="utf-8-sig") as stream:
            rows = json.load(stream)
    except (ValueError, RecursionError):
        return  # the loader names the error
    for number, row in enumerate(rows):
        if row is None:
            raise UserError(f"{file}, row {number}: the row is null; remove it")


def _nesting(line: bytes) -> int:
    """Depth of the lists and objects in a line of JSON; brackets inside strings do not count."""
    depth = deepest = 0
    for bracket in re.findall(rb"[\[\]{}]", re.sub(JSON_STRING, b"", line)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _has_nul_in_a_name(line: bytes) -> bool:
    """True if the name of a column or field in a line of JSON has the character U+0000; texts may have it."""
    strings = re.findall(JSON_STRING + rb"\s*(:?)", line)
    return any(colon and b"\\u0000" in re.sub(rb"\\[^u]", b"", string) for string, colon in strings)


def _json_lines(file: Path) -> list[str]:
    """Reads the rows of a file of JSON lines, or of one JSON array, as text. Blank lines are skipped."""
    try:
        with fsspec.open(str(file), "rt", compression="infer", encoding="utf-8") as stream:
            text = stream.read()
        if text.lstrip().startswith("["):
            return [json.dumps(row) for row in json.loads(text)]
    except (OSError, EOFError, ValueError, RecursionError) as error:  # errors of JSON and Unicode are ValueErrors
        raise UserError(f"{file} cannot be read ({one_line(error)})") from error
    return [line for line in text.split("\n") if line.strip()]


def _load_hub(path: str, name: str, split: str) -> Dataset:
    """Reads a data set from the hub, or from the cache of `datasets` if the hub does not answer in time."""
    unreachable = _why_unreachable(path)
    try:
        with _offline(unreachable is not None):
            dataset = load_dataset(path, name or None, split=split)
    except (ConnectionError, httpx.TransportError) as error:
        raise UserError(
            f"data set {path}: {datasets.config.HF_ENDPOINT} cannot be reached ({unreachable or one_line(error)}) and "
            f"no copy is in the cache; give a local folder in its layout ({name}/{split}-00000-of-00001.parquet, "
            f"or {split}.jsonl) or {BUNDLED!r}, the bundled task"
        ) from error
    except (DatasetNotFoundError, HfHubHTTPError, ValueError, FileNotFoundError) as error:
        raise UserError(f"data set {path} ({name}, {split}) cannot be used: {one_line(error)}") from error
    if unreachable:
        logger.warning("%s: the hub cannot be reached (%s); the cached copy is used", path, unreachable)
    return _decodable(dataset, f"data set {path}")


def _why_unreachable(path: str) -> str | None:
    """Queries the hub once, within `HUB_TIMEOUT_S`. Returns the reason if it cannot be reached.

    The loader itself would retry for most of a minute.
    """
    try:
        HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(path, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        return None  # the hub answers, and the loader reports the error
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except httpx.TransportError as error:
        return one_line(error)
    return None


@contextmanager
def _offline(on: bool) -> Iterator[None]:
    """Restricts `datasets` to its cache inside the block if `on` is true."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or on
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def one_line(error: BaseException) -> str:
    """Returns the first line of an error's cause, or of the error if it has none."""
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
