"""GSM8K and data sets in its layout, read from the hub, from disk or from the bundled generator; prompts for RL."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import httpx
from datasets import Dataset, load_dataset
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from megarl.data.arithmetic import cache_folder, write_arithmetic
from megarl.data.config import BUNDLED, DatasetConfig
from megarl.knobs import UserError

__all__ = ["DatasetConfig", "get_gsm8k_rl_dataset", "keep_within", "load_gsm8k", "prompt_ids", "split_dataset_by_node"]

logger = logging.getLogger(__name__)

COLUMNS = ("question", "answer")
FILE_TYPES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
HUB_TIMEOUT_S = 10.0
BAR_FROM_BYTES = 20_000_000  # smaller files are read in about a second: no progress bar
BAR_FROM_ROWS = 20_000
REWARD_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")


def load_gsm8k(path: str, split: str, name: str = "main") -> Dataset:
    """The rows of `split`, with at least the text columns `question` and `answer`.

    `path` is `arithmetic` (bundled), a file, a folder in the hub's layout (`main/train-00000-of-00001.parquet`, or
    parquet, json or jsonl files named by their split), or a hub name such as `openai/gsm8k`; what exists on disk goes
    before the hub. `split` may carry a slice: `train[:100]`. Raises `UserError` where nothing fit to use is found.
    """
    if path == BUNDLED:
        dataset = _load_folder(write_arithmetic(cache_folder()), name, split)
    elif (local := Path(path).expanduser()).exists():
        dataset = _load_folder(local, name, split) if local.is_dir() else _load_files([local], split)
    elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        dataset = _load_hub(path, name, split)
    else:
        raise UserError(
            f"data set {path!r} not found: it is no file or folder here and no hub name (owner/name); "
            f"give one of these, or {BUNDLED!r} for the bundled task"
        )
    _check_columns(dataset, path)
    return dataset


def get_gsm8k_rl_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None, name: str = "main", instruction: str = ""
) -> Dataset:
    r"""Prompts for RL: `messages` (one user turn: the question and `instruction`), `answer`, and the other columns.

    Prompts of more than `max_length` tokens, chat template included, are dropped with a warning that lists them.
    `instruction` is appended to each question, such as `"\nPut your final answer within \\boxed{}."`.
    """
    dataset = load_gsm8k(path, split, name)
    unmarked = [i for i, answer in enumerate(dataset["answer"]) if not re.search(r"####\s*[^\s#]", answer)]
    if unmarked:
        raise UserError(
            f"{len(unmarked)} of {len(dataset)} answers of {path} ({split}) lack '#### N', the first is "
            f"row {unmarked[0]}: {dataset[unmarked[0]]['answer'][-60:]!r}; rewards compare with the number after '####'"
        )
    clashing = [c for c in dataset.column_names if c in REWARD_ARGUMENTS]
    if clashing:
        logger.warning("columns %s are left out: reward functions have arguments of these names", clashing)
    dataset = mapped(dataset, _to_messages, {"instruction": instruction}, remove=["question", *clashing])
    return keep_within(dataset, max_length, "prompts", lambda row: len(prompt_ids(tokenizer, row["messages"])))


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The token ids a rollout starts from: the chat template's, or the text's own where the tokenizer has none."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return tokenizer.encode("".join(message["content"] for message in messages))


def keep_within(
    dataset: Dataset, max_length: int | None, what: str, length_of: Callable[[dict[str, Any]], int]
) -> Dataset:
    """The rows of at most `max_length` tokens; the others are counted and listed (row and length) in a warning."""
    if max_length is None:
        return dataset
    with progress_bars(len(dataset) >= BAR_FROM_ROWS):
        lengths = dataset.map(
            lambda row: {"length": length_of(row)}, remove_columns=dataset.column_names, desc=f"measuring {what}",
            load_from_cache_file=False, keep_in_memory=True,
        )["length"]  # fmt: skip
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
    return dataset.select([i for i, n in enumerate(lengths) if n <= max_length])


def mapped(
    dataset: Dataset, function: Callable[..., dict[str, Any]], arguments: dict[str, Any], remove: list[str]
) -> Dataset:
    """`Dataset.map` with a progress bar for long work only; `datasets` caches the result by its inputs' content."""
    with progress_bars(len(dataset) >= BAR_FROM_ROWS):
        return dataset.map(function, fn_kwargs=arguments, remove_columns=remove, desc="preparing data")


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Hides the bars of `datasets` inside the block where `shown` is false."""
    if shown or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _to_messages(row: dict[str, Any], instruction: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": row["question"] + instruction}]}


def _check_columns(dataset: Dataset, path: str) -> None:
    missing = [c for c in COLUMNS if c not in dataset.column_names]
    if missing:
        raise UserError(f"data set {path} has no column {' and no '.join(missing)}; it has {dataset.column_names}")
    if len(dataset) == 0:
        raise UserError(f"data set {path} is empty: it has its columns but no row")
    for column in COLUMNS:
        dtype = getattr(dataset.features[column], "dtype", "a nested value")
        if dtype not in ("string", "large_string"):
            raise UserError(f"column {column} of {path} holds {dtype}, text is needed; convert it to strings")
        if column_nulls := dataset.data.column(column).null_count:
            raise UserError(f"column {column} of {path} is empty (null) in {column_nulls} rows; drop or fill them")


def _kind(file: Path) -> str | None:
    """The loader for a file, by its ending; None where there is none."""
    suffixes = [s for s in file.suffixes if s not in COMPRESSIONS]
    return FILE_TYPES.get(suffixes[-1]) if suffixes else None


def _load_folder(folder: Path, name: str, split: str) -> Dataset:
    """Reads the files of `folder/name`, else `folder`, else `folder/data`, that are named by the split."""
    base = re.match(r"\w+", split)
    if base is None:
        raise UserError(f"split {split!r} is not a split name such as train or test[:100]")
    places = [p for p in (folder / name, folder, folder / "data") if p.is_dir()]
    for place in places:
        files = [f for f in sorted(place.iterdir()) if f.is_file() and _kind(f)]
        chosen = [f for f in files if re.fullmatch(rf"{base.group()}([-_.].*)?", f.name)]
        if chosen:
            return _load_files(chosen, split)
    found = sorted(f"{f.relative_to(folder)}" for p in places for f in p.iterdir() if not f.name.startswith("."))
    raise UserError(
        f"no file of the split {base.group()!r} in {folder}; it holds {found[:20] or 'nothing'}; wanted is "
        f"{name}/{base.group()}-00000-of-00001.parquet or {base.group()}.parquet, .json or .jsonl"
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
    base = re.match(r"\w+", split)
    with progress_bars(sum(f.stat().st_size for f in files) >= BAR_FROM_BYTES):
        try:
            return load_dataset(
                kinds.pop(), data_files={base.group() if base else split: [str(f) for f in files]}, split=split
            )
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
            raise UserError(f"{', '.join(map(str, files))} cannot be read ({_one_line(error)})") from error


def _load_hub(path: str, name: str, split: str) -> Dataset:
    """Reads a data set of the hub, or its copy in the cache of `datasets` where the hub does not answer in time."""
    unreachable = _why_unreachable(path)
    try:
        with _offline(unreachable is not None):
            dataset = load_dataset(path, name, split=split)
    except (ConnectionError, httpx.TransportError) as error:
        raise UserError(
            f"data set {path}: {datasets.config.HF_ENDPOINT} cannot be reached ({unreachable or _one_line(error)}) and "
            f"no copy is in the cache; give a local folder in its layout ({name}/{split}-00000-of-00001.parquet, "
            f"or {split}.jsonl) or {BUNDLED!r}, the bundled task"
        ) from error
    except (DatasetNotFoundError, HfHubHTTPError, ValueError, FileNotFoundError) as error:
        raise UserError(f"data set {path} ({name}, {split}) cannot be used: {_one_line(error)}") from error
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
        return _one_line(error)
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


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
