"""Rows from the hub, from disk or from a bundled generator. What lies on disk goes before the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import fsspec
import httpx
from datasets import Dataset, ReadInstruction, load_dataset
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
BAR_FROM_BYTES = 20_000_000  # smaller files are read in about a second: no progress bar


def load_table(path: str, split: str, name: str = "") -> Dataset:
    """The rows of `split` as a table, whose columns have one type each.

    `path` is a bundled name (`arithmetic`, `arithmetic_pairs`, `arithmetic_judged`), a file, a folder in the hub's
    layout (`main/train-00000-of-00001.parquet`, or parquet, json or jsonl files named by their split), or a hub name
    such as `openai/gsm8k`. `split` may carry a slice: `train[:100]`.

    Raises:
        UserError: nothing fit to use is found.
    """
    files = _local_files(path, split, name)
    return _load_hub(path, name, split) if files is None else _load_files(files, split)


def load_rows(path: str, split: str, name: str = "") -> Dataset:
    """As `load_table`, but json files come as one column of text, `json`, a row each.

    Rows may then differ in shape, and one that is not as it should be can be named. `prepare.parsed` reads them back.
    """
    files = _local_files(path, split, name)
    if files is None:
        return _load_hub(path, name, split)
    if {_kind(f) for f in files} != {"json"}:
        return _load_files(files, split)
    lines = [line for file in files for line in _json_lines(file)]
    if not lines:
        raise UserError(f"data set {path} is empty: {', '.join(map(str, files))} holds no row")
    slices = ReadInstruction.from_spec(split).to_absolute({_base(split): len(lines)})
    return Dataset.from_dict({JSON: [line for part in slices for line in lines[part.from_ : part.to]]})


def _local_files(path: str, split: str, name: str) -> list[Path] | None:
    """The files of the split, or None for a hub name."""
    if path in GENERATORS:
        return _split_files(write_arithmetic(cache_folder(path), generate=GENERATORS[path]), name, split)
    if (local := Path(path).expanduser()).exists():
        return _split_files(local, name, split) if local.is_dir() else [local]
    if not HUB_NAME.fullmatch(path):
        raise UserError(
            f"data set {path!r} not found: it is no file or folder here and no hub name (owner/name); "
            f"give one of these, or {BUNDLED!r} for the bundled task"
        )
    return None


def _base(split: str) -> str:
    base = re.match(r"\w+", split)
    if base is None:
        raise UserError(f"split {split!r} is not a split name such as train or test[:100]")
    return base.group()


def _kind(file: Path) -> str | None:
    """The loader for a file, by its ending; None where there is none."""
    suffixes = [s for s in file.suffixes if s not in COMPRESSIONS]
    return FILE_TYPES.get(suffixes[-1]) if suffixes else None


def _split_files(folder: Path, name: str, split: str) -> list[Path]:
    """The files of `folder/name`, else `folder`, else `folder/data`, that are named by the split."""
    base = _base(split)
    places = [p for p in dict.fromkeys((folder / name, folder, folder / "data")) if p.is_dir()]
    for place in places:
        files = [f for f in sorted(place.iterdir()) if f.is_file() and _kind(f)]
        chosen = [f for f in files if re.fullmatch(rf"{base}([-_.].*)?", f.name)]
        if chosen:
            return chosen
    found = sorted(f"{f.relative_to(folder)}" for p in places for f in p.iterdir() if not f.name.startswith("."))
    wanted = f"{name}/{base}-00000-of-00001.parquet" if name else f"{base}-00000-of-00001.parquet"
    raise UserError(
        f"no file of the split {base!r} in {folder}; it holds {found[:20] or 'nothing'}; wanted is "
        f"{wanted} or {base}.parquet, .json or .jsonl"
    )


def _load_files(files: list[Path], split: str) -> Dataset:
    """Reads files of one type as the split; a file that was named outright is the split asked for."""
    kinds = {_kind(f) for f in files}
    if len(kinds) > 1 or None in kinds:
        raise UserError(
            f"{', '.join(map(str, files))}: a split's files must all be parquet, or all json or jsonl (.gz is fine)"
        )
    if any(f.stat().st_size == 0 for f in files):
        raise UserError(f"data set {', '.join(str(f) for f in files)} is empty: the file has no bytes")
    with progress_bars(sum(f.stat().st_size for f in files) >= BAR_FROM_BYTES):
        try:
            return load_dataset(kinds.pop(), data_files={_base(split): [str(f) for f in files]}, split=split)
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
            raise UserError(f"{', '.join(map(str, files))} cannot be read ({one_line(error)})") from error


def _json_lines(file: Path) -> list[str]:
    """The rows of a file of JSON lines, or of one JSON array, as text; blank lines are none."""
    try:
        with fsspec.open(str(file), "rt", compression="infer", encoding="utf-8") as stream:
            text = stream.read()
        if text.lstrip().startswith("["):
            return [json.dumps(row, ensure_ascii=False) for row in json.loads(text)]
    except (OSError, EOFError, ValueError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise UserError(f"{file} cannot be read ({one_line(error)})") from error
    return [line for line in text.split("\n") if line.strip()]


def _load_hub(path: str, name: str, split: str) -> Dataset:
    """Reads a data set of the hub, or its copy in the cache of `datasets` where the hub does not answer in time."""
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
    return dataset


def _why_unreachable(path: str) -> str | None:
    """Asks the hub once, within `HUB_TIMEOUT_S` (the loader itself would retry for most of a minute)."""
    try:
        HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(path, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        return None  # it answers; the loader says what is wrong
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except httpx.TransportError as error:
        return one_line(error)
    return None


@contextmanager
def _offline(on: bool) -> Iterator[None]:
    """Inside the block `datasets` looks into its cache only, where `on`."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or on
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def one_line(error: BaseException) -> str:
    """The first line of an error, or of its cause."""
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
