"""Collates rows into batches: padding, and an endless seeded stream of batches that resumes exactly."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from megarl.data.config import DatasetConfig
from megarl.data.mixture import Counted, Mixture, Origins, record_counts, record_episodes
from megarl.data.stream import RowStream, StreamMixture
from megarl.knobs import UserError
from megarl.types import Episode

BATCH_DEADLINE_S = 600.0  # of processes that load rows; for a hang alone


def pad_sequences_to_tensors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pads rows of equal keys into `{key: [batch, length]}`, zeros on the right, and adds `attention_mask`.

    A key holds either one value per token of the row's `input_ids`, or one number per row, which becomes `[batch]`.
    `loss_mask` and `attention_mask` are bool.

    Raises:
        UserError: the rows differ in keys, or a value has neither shape.
    """
    if not rows or not all("input_ids" in row for row in rows):
        raise UserError(f"a batch needs rows with 'input_ids', got {[sorted(row) for row in rows[:1]] or 'no row'}")
    batch: dict[str, Tensor] = {}
    for key in rows[0]:
        values = [_as_tensor(row, key, i) for i, row in enumerate(rows)]
        if all(value.ndim == 0 for value in values):
            batch[key] = torch.stack(values)
            continue
        for i, (row, value) in enumerate(zip(rows, values, strict=True)):
            if value.shape != (len(row["input_ids"]),):
                raise UserError(
                    f"row {i}: {key} has shape {list(value.shape)}, its input_ids have length {len(row['input_ids'])}; "
                    "a key holds one value per token or one number per row"
                )
        batch[key] = pad_sequence(values, batch_first=True)
    for i, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise UserError(f"row {i} has the keys {sorted(row)}, row 0 has {sorted(rows[0])}; all rows need the same")
    if "attention_mask" not in batch:
        ones = [torch.ones(len(row["input_ids"]), dtype=torch.bool) for row in rows]
        batch["attention_mask"] = pad_sequence(ones, batch_first=True)
    for key in ("loss_mask", "attention_mask"):
        if key in batch:
            batch[key] = batch[key].bool()
    return batch


def _as_tensor(row: Mapping[str, Any], key: str, index: int) -> Tensor:
    if key not in row:
        raise UserError(f"row {index} has no {key!r}, row 0 has it; all rows of a batch need the same keys")
    try:
        return torch.as_tensor(row[key])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"row {index}: {key} is {type(row[key]).__name__}, which is not a tensor; remove the column before batching"
        ) from error


class EpochSampler(Sampler[int]):
    """Orders the rows of one epoch. Deterministic in seed and epoch."""

    def __init__(self, size: int, shuffle: bool, seed: int):
        self.size, self.shuffle, self.seed, self.epoch = size, shuffle, seed, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.size))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return iter(torch.randperm(self.size, generator=generator).tolist())


class Batches:
    """Endless stream of batches over the epochs of a data set: `next(batches)`.

    `state_dict()` holds only values that JSON can store. Another `Batches` with the same data and config that loads it
    continues with exactly the next batch. `collate_fn` makes a batch from a list of rows: `list` (unchanged) for RL,
    `pad_sequences_to_tensors` for SFT.

    Rows of a `Mixture` keep their origin with `list`. Another `collate_fn` does not see it; then the share and the
    length of each source are recorded.
    """

    def __init__(self, dataset: Any, config: DatasetConfig, collate_fn: Callable[[list[Any]], Any] = list):
        size = len(dataset)
        if config.batch_size < 1:
            raise UserError(f"batch_size is {config.batch_size}, it must be at least 1")
        if config.batch_size > size:
            raise UserError(
                f"batch_size {config.batch_size} exceeds the {size} rows of {config.describe()}; "
                "make batch_size smaller or give more data"
            )
        self._identity: dict[str, Any] = {
            "rows": size,
            "batch_size": config.batch_size,
            "shuffle": config.shuffle,
            "seed": config.seed,
        }
        self.labels: list[str] = []  # of the mixed sources
        mixture = dataset.dataset if isinstance(dataset, Origins) else dataset
        if isinstance(mixture, Mixture):
            self.labels = mixture.labels
            self._identity["sources"] = mixture.identity()
            dataset = Origins(mixture)
        self._counted = bool(self.labels) and collate_fn is not list
        collate_fn = Counted(collate_fn) if self._counted else collate_fn
        self._sampler = EpochSampler(size, config.shuffle, config.seed)
        self.loader = StatefulDataLoader(
            dataset,
            batch_size=config.batch_size,
            sampler=self._sampler,
            num_workers=config.num_workers,
            collate_fn=collate_fn,
            drop_last=config.drop_last,
            # Without a generator of its own, the loader would draw from the global one at every epoch.
            generator=torch.Generator().manual_seed(config.seed),
            **_processes(config, dataset, collate_fn),
        )
        self._rows: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Number of batches in one epoch."""
        return len(self.loader)

    @property
    def batch_size(self) -> int:
        """Number of rows in a batch."""
        return int(self._identity["batch_size"])

    @property
    def rows(self) -> int:
        """Number of rows in the data set."""
        return int(self._identity["rows"])

    @property
    def examples(self) -> Any:
        """The rows themselves."""
        return self.loader.dataset

    @property
    def epoch(self) -> int:
        """Number of the epoch of the batch given last, from 0."""
        return self._sampler.epoch

    def observe(self, episodes: Sequence[Episode]) -> None:
        """Records the rewards, lengths and shares of mixed sources, for batches of prompts."""
        record_episodes(self.labels, episodes)

    def _unpack(self, batch: Any) -> Any:
        if not self._counted:
            return batch
        record_counts(self.labels, batch[1])
        return batch[0]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._unpack(self._next())
        except StopIteration:
            self._sampler.epoch += 1
            self._rows = None
            return self._unpack(self._next())

    def _next(self) -> Any:
        try:
            if self._rows is None:
                self._rows = iter(self.loader)
            return next(self._rows)
        except (RuntimeError, ConnectionError, EOFError) as error:
            said = str(error)  # a row's own error in a process begins with "Caught"
            # A process that ends in the middle of a tensor ends its connection.
            lost = not isinstance(error, RuntimeError) and self.loader.num_workers > 0 and not said.startswith("Caught")
            if not (lost or said.startswith("DataLoader")):
                raise
            raise RuntimeError(
                f"the processes that load rows gave no batch ({said or 'EOFError'}); what they printed is above; "
                f"num_workers={self.loader.num_workers} can be set to 0, which loads in the trainer"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream."""
        return {**self._identity, "epoch": self._sampler.epoch, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves the stream to the position of `state`.

        Raises:
            UserError: the number of rows, batch size, shuffling, seed or mixed sources differ, or a stream wrote the
                state.
        """
        _refuse_other_kind(state, "loader")
        _refuse_change(self._identity, state)
        self._sampler.epoch = state["epoch"]
        self.loader.load_state_dict(dict(state["loader"]))
        self._rows = None


def _processes(config: DatasetConfig, dataset: Any, collate_fn: Any) -> dict[str, Any]:
    """Options of a loader with processes. Each starts from an empty one, not as a copy of the trainer.

    A copy has none of the trainer's threads, but all of its locks and process groups. It stops where it waits for one.

    Raises:
        UserError: the data set or `collate_fn` cannot be handed to another process.
    """
    if not config.num_workers:
        return {}
    try:
        pickle.dumps((dataset, collate_fn))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"num_workers={config.num_workers} hands rows and collate_fn to other processes, and they cannot be "
            f"pickled ({error}); define their functions at the top of a module, or set num_workers=0"
        ) from error
    return {"multiprocessing_context": "spawn", "timeout": BATCH_DEADLINE_S}


class StreamBatches:
    """Endless stream of batches of rows that are read when they are needed; otherwise as `Batches`.

    `rows` is None: nobody has counted them.
    """

    rows = None

    def __init__(
        self,
        stream: RowStream | StreamMixture,
        config: DatasetConfig,
        collate_fn: Callable[[list[Any]], Any] = list,
    ):
        self.stream, self.batch_size = stream, config.batch_size
        self.labels = stream.labels if isinstance(stream, StreamMixture) else []
        self._counted = bool(self.labels) and collate_fn is not list
        self._collate = Counted(collate_fn) if self._counted else collate_fn
        self._identity = {"batch_size": config.batch_size, "shuffle": config.shuffle, "seed": config.seed}

    @property
    def examples(self) -> list[Any]:
        """The first rows."""
        return self.stream.first_rows

    def observe(self, episodes: Sequence[Episode]) -> None:
        """Records the rewards, lengths and shares of mixed sources, for batches of prompts."""
        record_episodes(self.labels, episodes)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._collate([next(self.stream) for _ in range(self.batch_size)])
        if self._counted:
            batch, counts = batch
            record_counts(self.labels, counts)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream."""
        return {**self._identity, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves the stream to the position of `state`.

        Raises:
            UserError: batch size, shuffling, window, seed or sources differ, or no stream wrote the state.
        """
        _refuse_other_kind(state, "stream")
        _refuse_change(self._identity, state)
        self.stream.load_state_dict(state["stream"])


def batches_of(
    dataset: Any, config: DatasetConfig, collate_fn: Callable[[list[Any]], Any] = list
) -> Batches | StreamBatches:
    """Returns the batches of a data set in memory, or of a stream."""
    streamed = isinstance(dataset, RowStream | StreamMixture)
    return (StreamBatches if streamed else Batches)(dataset, config, collate_fn)


def _refuse_change(identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises `UserError` if the data's identity is not that of a checkpoint. Older ones name no sources."""
    for key, value in identity.items():
        if state.get(key, value) != value:
            raise UserError(
                f"cannot resume the data order: {key} was {state[key]} at the checkpoint and is {value} now; "
                "resume with the same data and data settings"
            )


def _refuse_other_kind(state: Mapping[str, Any], key: str) -> None:
    if key not in state:
        was, now = ("true", "false") if key == "loader" else ("false", "true")
        raise UserError(
            f"cannot resume the data order: train_dataset.stream was {was} at the checkpoint and is {now} now; resume "
            f"with train_dataset.stream={was}"
        )
