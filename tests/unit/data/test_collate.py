import gc
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import collate
from megarl.data.collate import Batches, pad_sequences_to_tensors
from megarl.data.prompts import DatasetConfig
from megarl.data.sft import get_gsm8k_sft_dataset
from megarl.knobs import UserError
from megarl.types import PackedBatch


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=9), min_size=1, max_size=6))
def test_padding_then_packing_gives_the_rows_back(sequences: list[list[int]]) -> None:
    rows = [{"input_ids": s, "loss_mask": [t % 2 for t in s], "reward": float(len(s))} for s in sequences]
    padded = pad_sequences_to_tensors(rows)
    assert padded["input_ids"].shape == (len(rows), max(map(len, sequences)))
    assert padded["attention_mask"].sum(-1).tolist() == [len(s) for s in sequences]
    assert padded["loss_mask"].dtype == padded["attention_mask"].dtype == torch.bool
    packed = PackedBatch.from_padded(padded)
    assert packed["input_ids"].tolist() == [t for s in sequences for t in s]
    assert packed["loss_mask"].tolist() == [bool(t % 2) for s in sequences for t in s]
    assert packed["reward"].tolist() == [float(len(s)) for s in sequences]


def test_padding_keeps_types_and_a_given_attention_mask() -> None:
    rows = [
        {"input_ids": torch.tensor([1, 2]), "attention_mask": [1, 0], "rollout_logprobs": torch.tensor([0.0, -1.5])},
        {"input_ids": torch.tensor([3]), "attention_mask": [1], "rollout_logprobs": torch.tensor([0.0])},
    ]
    padded = pad_sequences_to_tensors(rows)
    assert padded["attention_mask"].tolist() == [[True, False], [True, False]]
    assert padded["rollout_logprobs"].dtype == torch.float32
    assert padded["input_ids"].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no row"),
        ([{"loss_mask": [1]}], "input_ids"),
        ([{"input_ids": [1], "text": "one"}], "text is str.*remove the column"),
        ([{"input_ids": [1, 2], "loss_mask": [1]}], "row 0: loss_mask"),
        ([{"input_ids": [1]}, {"input_ids": [1], "x": 1}], "row 1 has the keys"),
        ([{"input_ids": [1], "x": 1}, {"input_ids": [1]}], "row 1 has no 'x'"),
        ([{"input_ids": [1], "x": 1}, {"input_ids": [1], "x": [[1]]}], "row 0: x"),
    ],
)
def test_rows_that_do_not_fit_are_named(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pad_sequences_to_tensors(rows)


def numbers(size: int) -> Dataset:
    return Dataset.from_dict({"i": list(range(size))})


def indices(batch: list[dict[str, int]]) -> list[int]:
    return [row["i"] for row in batch]


def test_an_epoch_gives_every_row_once_and_the_next_in_another_order() -> None:
    batches = Batches(numbers(12), DatasetConfig(batch_size=4))
    epochs = [[indices(next(batches)) for _ in range(len(batches))] for _ in range(3)]
    for epoch in epochs:
        assert sorted(i for batch in epoch for i in batch) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_seed_decides_the_order() -> None:
    first = [indices(next(Batches(numbers(50), DatasetConfig(batch_size=10, seed=seed)))) for seed in (0, 0, 1, -1)]
    assert first[0] == first[1]
    assert len({tuple(f) for f in first}) == 3


def test_no_two_pairs_of_seed_and_epoch_share_an_order() -> None:
    orders = []
    for seed in range(4):
        batches = Batches(numbers(50), DatasetConfig(batch_size=50, seed=seed))
        orders += [tuple(indices(next(batches))) for _ in range(4)]
    assert len(set(orders)) == 16


def test_the_stream_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    batches = Batches(numbers(6), DatasetConfig(batch_size=3))
    for _ in range(6):  # three epochs
        next(batches)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_shuffle_the_files_order_is_kept_and_the_last_batch_may_be_short() -> None:
    batches = Batches(numbers(5), DatasetConfig(batch_size=2, shuffle=False, drop_last=False))
    assert [indices(next(batches)) for _ in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    batches = Batches(numbers(5), DatasetConfig(batch_size=2, shuffle=False, drop_last=True))
    assert [indices(next(batches)) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


@settings(max_examples=60)
@given(
    size=st.integers(1, 13), batch_size=st.integers(1, 5), shuffle=st.booleans(), drop_last=st.booleans(),
    stops=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)  # fmt: skip
def test_a_stopped_stream_resumes_with_the_batch_that_came_next(
    size: int, batch_size: int, shuffle: bool, drop_last: bool, stops: list[int]
) -> None:
    config = DatasetConfig(batch_size=min(batch_size, size), shuffle=shuffle, drop_last=drop_last, seed=3)
    unbroken = Batches(numbers(size), config)
    expected = [indices(next(unbroken)) for _ in range(sum(stops) + 3)]
    resumed: list[list[int]] = []
    stream = Batches(numbers(size), config)
    for stop in stops:
        resumed += [indices(next(stream)) for _ in range(stop)]
        state = json.loads(json.dumps(stream.state_dict()))
        stream = Batches(numbers(size), config)
        stream.load_state_dict(state)
    resumed += [indices(next(stream)) for _ in range(3)]
    assert resumed == expected


def test_loading_a_state_moves_a_stream_in_use_back() -> None:
    stream = Batches(numbers(9), DatasetConfig(batch_size=2))
    next(stream)
    state = stream.state_dict()
    following = [indices(next(stream)) for _ in range(6)]
    stream.load_state_dict(state)
    assert [indices(next(stream)) for _ in range(6)] == following


def test_worker_processes_give_the_same_order_and_resume_too() -> None:
    plain = Batches(numbers(8), DatasetConfig(batch_size=2))
    expected = [indices(next(plain)) for _ in range(6)]
    config = DatasetConfig(batch_size=2, num_workers=1)
    stream = Batches(numbers(8), config)
    first = [indices(next(stream)) for _ in range(3)]
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = Batches(numbers(8), config)
    resumed.load_state_dict(state)
    assert first + [indices(next(resumed)) for _ in range(3)] == expected


SET_BY_TEST: list[int] = []  # what a copy of this process would have too


class Copied:
    """One row: what the process that reads it has of the test's."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> list[int]:
        return SET_BY_TEST


class Rows:
    """Four rows. The last cannot be read: `fault` is called in its place."""

    def __init__(self, fault: Callable[[], None]) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        if row == 3:
            self.fault()
        return row


def hang() -> None:
    time.sleep(600)


def end() -> None:
    os._exit(3)


def refuse() -> None:
    raise RuntimeError("row 3 is no row")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (hang, r"gave no batch \(DataLoader timed out after 5.0 seconds\).*num_workers=1 can be set to 0"),
        # torch notices the end of a process by a signal, whatever is being done; only in a wait is it about a batch
        (end, r"DataLoader worker \(pid(\(s\))? \d+\) exited unexpectedly"),
        (refuse, r"(?s)^Caught RuntimeError in DataLoader worker process.*row 3 is no row"),
    ],
)
def test_a_process_that_gives_no_batch_is_named(
    fault: Callable[[], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is hang:
        monkeypatch.setattr(collate, "BATCH_DEADLINE_S", 5.0)
    stream = Batches(Rows(fault), DatasetConfig(batch_size=1, shuffle=False, num_workers=1))
    with pytest.raises(RuntimeError, match=message):
        list(itertools.islice(stream, 4))


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), r"\[Errno 104\] Connection reset by peer"),
        (EOFError(), "EOFError"),
    ],
)
def test_a_process_that_ends_in_the_middle_of_a_tensor_is_named(error: Exception, named: str) -> None:
    stream = Batches(Rows(end), DatasetConfig(batch_size=1, shuffle=False, num_workers=1))

    def broken() -> Iterator[Any]:
        raise error
        yield

    stream._rows = broken()
    with pytest.raises(RuntimeError, match=rf"gave no batch \({named}\).*num_workers=1"):
        next(stream)


def refuse_connection() -> None:
    raise ConnectionError("row 3 has no server")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rows_own_error_of_a_connection_stays_what_it_is(num_workers: int) -> None:
    stream = Batches(Rows(refuse_connection), DatasetConfig(batch_size=1, shuffle=False, num_workers=num_workers))
    with pytest.raises(ConnectionError, match="row 3 has no server"):
        list(itertools.islice(stream, 4))


def test_processes_that_load_rows_end_with_their_stream() -> None:
    """And not when garbage is next collected, in the middle of something else."""
    gc.collect()
    before = set(multiprocessing.active_children())  # of other tests
    gc.disable()
    try:
        stream = Batches(numbers(8), DatasetConfig(batch_size=2, num_workers=1))
        next(stream)
        (process,) = set(multiprocessing.active_children()) - before
        del stream
        process.join(300)
        assert not process.is_alive()
    finally:
        gc.enable()


def test_processes_that_load_rows_are_no_copies_of_the_trainer() -> None:
    """A copy would wait for ever where another thread of the trainer held a lock."""
    SET_BY_TEST[:] = [1]
    assert next(Batches(Copied(), DatasetConfig(batch_size=1))) == [[1]]
    assert next(Batches(Copied(), DatasetConfig(batch_size=1, num_workers=1))) == [[]]


def test_rows_that_no_other_process_can_have_are_refused() -> None:
    message = r"num_workers=2 hands rows and collate_fn to other processes, .*lambda.*set num_workers=0"
    with pytest.raises(UserError, match=message):
        Batches(numbers(8), DatasetConfig(batch_size=2, num_workers=2), lambda rows: rows)


@pytest.mark.parametrize("change", [{"batch_size": 3}, {"seed": 1}, {"shuffle": False}])
def test_a_stream_with_other_data_settings_cannot_resume(change: dict[str, Any]) -> None:
    state = Batches(numbers(9), DatasetConfig(batch_size=2)).state_dict()
    key = next(iter(change))
    with pytest.raises(UserError, match=f"{key} was .* at the checkpoint"):
        Batches(numbers(9), DatasetConfig(**{"batch_size": 2, **change})).load_state_dict(state)
    with pytest.raises(UserError, match="rows was 9"):
        Batches(numbers(8), DatasetConfig(batch_size=2)).load_state_dict(state)


@pytest.mark.parametrize(("batch_size", "message"), [(10, "batch_size 10 exceeds the 9 rows"), (0, "at least 1")])
def test_a_batch_size_that_cannot_be_filled_is_refused(batch_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Batches(numbers(9), DatasetConfig(batch_size=batch_size))


def test_sft_rows_arrive_padded_and_masked(tokenizer: Any) -> None:
    dataset = get_gsm8k_sft_dataset("arithmetic", "test", tokenizer)
    batch = next(Batches(dataset, DatasetConfig(batch_size=16), pad_sequences_to_tensors))
    assert batch["input_ids"].shape == batch["loss_mask"].shape == batch["attention_mask"].shape
    assert batch["input_ids"].shape[0] == 16
    assert not (batch["loss_mask"] & ~batch["attention_mask"]).any()
