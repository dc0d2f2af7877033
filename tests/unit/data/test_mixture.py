"""Weighted mixtures: exact shares, exact resume, metrics of each source, and mistakes that name the source."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from megarl.data.collate import Batches, pad_sequences_to_tensors
from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.mixture import Mixture, Origins, column_sets, record_counts, record_episodes, source_labels
from megarl.data.prompts import get_rl_dataset
from megarl.data.sft import get_sft_dataset
from megarl.knobs import UserError, check_ranges
from megarl.observe.metrics import stats_tracker
from megarl.types import ORIGIN, Episode, PackedBatch, cu_seqlens_of

MIXED = DatasetConfig(
    sources=[
        SourceConfig("arithmetic", "main", "train[:30]", weight=3, label="sums"),
        SourceConfig("arithmetic", "main", "test[:20]", weight=1, label="rest"),
    ],
    batch_size=8,
    seed=5,
)


def mixture(*sizes: int, weights: tuple[float, ...] = ()) -> Mixture:
    parts = [[{"k": k, "i": i} for i in range(size)] for k, size in enumerate(sizes)]
    return Mixture(parts, weights or [0.0] * len(sizes), [f"s{k}" for k in range(len(sizes))])


def test_an_epoch_has_the_shares_of_the_weights_exactly() -> None:
    batches = _prompts(mixture(30, 20, weights=(3, 1)), 20)
    rows = [row for _ in range(4) for row in next(batches)]
    counts = [sum(row[ORIGIN]["source"] == label for row in rows) for label in ("s0", "s1")]
    assert counts == [60, 20]


def _prompts(dataset: Any, batch_size: int, seed: int = 0) -> Batches:
    return Batches(dataset, DatasetConfig(batch_size=batch_size, seed=seed))


def test_a_row_that_is_repeated_has_one_number() -> None:
    mixed = mixture(3, 8, weights=(1, 1))
    numbers = [mixed.origin(i)["row"] for i in range(len(mixed))]
    assert numbers == [0, 1, 2, 0, 1, 2, 0, 1, *range(3, 11)]
    assert Origins(mixed).distinct == mixed.distinct == 11
    assert source_labels(mixed) == ["s0"] * 8 + ["s1"] * 8
    assert source_labels([1, 2]) == []


def test_a_mixture_resumes_token_for_token(tokenizer: PreTrainedTokenizerBase) -> None:
    data = get_sft_dataset(MIXED, tokenizer)

    def take(batches: Batches, count: int) -> list[torch.Tensor]:
        return [next(batches)["input_ids"] for _ in range(count)]

    unbroken = take(Batches(data, MIXED, pad_sequences_to_tensors), 20)
    for taken in (0, 1, 4, 5, 13):  # an epoch has 5 batches
        first, resumed = (Batches(data, MIXED, pad_sequences_to_tensors) for _ in range(2))
        take(first, taken)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = take(resumed, 20 - taken)
        assert all(torch.equal(a, b) for a, b in zip(rest, unbroken[taken:], strict=True))


def test_the_seed_decides_the_order() -> None:
    orders = [next(_prompts(mixture(50, 50), 20, seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_a_checkpoint_of_other_weights_is_refused_and_an_older_one_taken() -> None:
    state = _prompts(mixture(8, 8, weights=(1, 1)), 4).state_dict()
    with pytest.raises(UserError, match="sources was s0 8 x 1, s1 8 x 1 at the checkpoint and is s0 8 x 0, s1 8 x 0"):
        _prompts(mixture(8, 8), 4).load_state_dict(state)
    older = {key: value for key, value in state.items() if key != "sources"}
    _prompts(mixture(8, 8), 4).load_state_dict(older)


def test_a_single_data_set_has_the_order_and_the_rows_that_it_had() -> None:
    rows = [{"i": i} for i in range(10)]
    order = torch.randperm(10, generator=torch.Generator().manual_seed(4 * 1_000_003)).tolist()
    assert next(_prompts(rows, 10, seed=4)) == [{"i": i} for i in order]


def test_share_and_length_of_each_source_are_recorded(tokenizer: PreTrainedTokenizerBase) -> None:
    data = get_sft_dataset(MIXED, tokenizer)
    batches = Batches(data, MIXED, pad_sequences_to_tensors)
    stats_tracker.export()
    tokens = shares = 0.0
    for _ in range(len(batches)):
        batch = next(batches)
        assert set(batch) == {"input_ids", "loss_mask", "attention_mask"}
        tokens += float(batch["attention_mask"].sum())
        step = stats_tracker.step()
        shares = step["data/sums/share"] + step["data/rest/share"]
        assert shares == pytest.approx(1)
    stats = stats_tracker.export()
    assert stats["data/sums/share"] == pytest.approx(0.75, abs=0.03)  # an epoch's rows, but for its last batch
    mean = 0.75 * stats["data/sums/length"] + 0.25 * stats["data/rest/length"]
    assert mean == pytest.approx(tokens / (8 * len(batches)), rel=0.05)


def test_a_source_without_a_row_in_a_batch_has_the_share_0_and_no_length() -> None:
    stats_tracker.export()
    record_counts(["sums", "rest"], {"sums": (4, 40)})
    assert stats_tracker.export() == {"data/sums/share": 1.0, "data/sums/length": 10.0, "data/rest/share": 0.0}


def test_rewards_lengths_and_rejections_go_to_their_source() -> None:
    def episode(label: str, rewards: list[float], tokens: int) -> Episode:
        size = len(rewards)
        group = PackedBatch(
            cu_seqlens_of(torch.full((size,), tokens)),
            {"loss_mask": torch.ones(size * tokens, dtype=torch.bool)},
            {"rewards": torch.tensor(rewards)},
        )
        return Episode("0", group, origin={"source": label, "row": 0})

    stats_tracker.export()
    refused = Episode("3", None, "refused", origin={"source": "b", "row": 1}, rewards=(1.0, 1.0))
    record_episodes(["a", "b", "c"], [episode("a", [1, 0], 4), episode("a", [1, 1], 2), episode("b", [0], 9), refused])
    stats = stats_tracker.export()
    assert stats["data/a/reward"] == 0.75
    assert stats["data/a/length"] == 3
    assert stats["data/b/length"] == 9
    assert stats["data/a/share"] == pytest.approx(2 / 3)
    assert (stats["data/b/rejected"], stats["data/a/rejected"]) == (1, 0)
    assert stats["data/c/share"] == 0
    assert "data/c/reward" not in stats


def test_sources_are_named_by_their_paths_and_numbered_if_they_end_alike() -> None:
    paths = ["x/train.jsonl.gz", "y/train.parquet", "openai/gsm8k", "a b.jsonl"]
    assert DatasetConfig(sources=[SourceConfig(p) for p in paths]).labels() == ["train", "train-2", "gsm8k", "a_b"]
    given = [SourceConfig("x/train.jsonl"), SourceConfig("z.jsonl", label="train")]
    assert DatasetConfig(sources=given).labels() == ["train-2", "train"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"weight": 1.0}, {"weight": 0.0}], r"sources have the weights \[1.0, 0.0\]; give each a weight above 0"),
        ([{"weight": -1.0}, {"weight": 1.0}], "weights|weight=-1.0 must be at least 0"),
        ([{"weight": float("nan")}, {"weight": 1.0}], "weights|weight=nan must be"),
        ([{"weight": float("inf")}, {"weight": 1.0}], "weights|weight=inf must be"),
        ([{"label": "a"}, {"label": "a"}], "sources have the label 'a' 2 times; give each a label of its own"),
        ([{"label": "a b"}, {}], "label 'a b'; use 1 to 64 letters"),
        ([{"path": ""}, {}], r"sources\[0\] has no path"),
    ],
)
def test_sources_that_contradict_each_other_are_refused(changes: list[dict[str, Any]], message: str) -> None:
    data = DatasetConfig(sources=[SourceConfig(**{"path": f"{i}.jsonl", **change}) for i, change in enumerate(changes)])
    with pytest.raises(UserError, match=message) as error:
        data.parts()
    assert "\n" not in str(error.value)
    weights = [change.get("weight", 0.0) for change in changes]
    if not all(0 <= weight <= 1e9 for weight in weights):
        with pytest.raises(UserError, match="weight="):
            check_ranges(data, "train_dataset")


def test_the_error_of_one_source_names_it(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    empty, bad = tmp_path / "empty.jsonl", tmp_path / "bad.jsonl"
    empty.write_text("")
    bad.write_text('{"messages": 3}\n')
    for broken, label, why in ((empty, "empty", "is empty"), (bad, "bad", "row 0: messages is 3")):
        source = SourceConfig(str(broken), "", type="messages")
        config = dataclasses.replace(MIXED, sources=[dataclasses.replace(MIXED.sources[0], weight=0), source])
        with pytest.raises(UserError, match=f"^source {label}: .*{why}"):
            get_rl_dataset(config, tokenizer)


def test_columns_are_known_for_each_source(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "2+3?"}], "level": 2}) + "\n")
    sources = [SourceConfig("arithmetic", "main", "test[:4]"), SourceConfig(str(chats), "", type="messages")]
    data = get_rl_dataset(DatasetConfig(sources=sources), tokenizer)
    assert column_sets(data) == {"arithmetic": {"answer", "messages"}, "chats": {"messages", "level"}}
    assert data[4]["level"] == 2
