import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from megarl.data.arithmetic import Sum, split_sums
from megarl.data.arithmetic_pairs import PAIRS, generate_judged, generate_pairs
from megarl.data.collate import Batches
from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.examples import get_preference_dataset, pack_judged, pack_preferences, with_mismatched
from megarl.data.mixture import Mixture
from megarl.knobs import UserError

PAIRED = DatasetConfig(path="arithmetic_pairs", type="chat_template.default", split="test", batch_size=8)
JUDGED = DatasetConfig(
    path="arithmetic_judged",
    type="user_defined.default",
    split="test",
    batch_size=8,
    options={"prompt_format": "<|user|>{prompt}<|assistant|>"},
)


def worked(answer: str) -> tuple[bool, Sum]:
    """Returns True if both steps of an answer are right, and the answer's sum."""
    first, second, last = answer.split("\n")
    a, middle = first.split("=")
    b, result = second.split("=")
    op1, op2 = next(o for o in "+-" if o in a), next(o for o in "+-" if o in b)
    x, y = map(int, a.split(op1))
    m, z = map(int, b.split(op2))
    right = (x + y if op1 == "+" else x - y) == int(middle) and (m + z if op2 == "+" else m - z) == int(result)
    assert m == int(middle)
    assert last == f"#### {result}"
    return right, Sum(x, op1, y, op2, z)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_bundled_pairs_are_right_and_wrong_and_splits_share_no_sum(split: str) -> None:
    rows = generate_pairs(split)
    assert len(rows) == PAIRS[split]
    split_set = set(split_sums()[split == "test"])
    for row in rows:
        right, s = worked(row["chosen"]["content"])
        wrong, other = worked(row["rejected"]["content"])
        assert right
        assert not wrong
        assert s == other
        assert s in split_set
        assert abs(int(row["rejected"]["content"].split("#### ")[1]) - s.result) == 1
    assert rows == generate_pairs(split)
    judged = generate_judged(split)
    assert Counter(row["label"] for row in judged) == {True: len(rows) // 2, False: len(rows) // 2}
    assert all(worked(row["completion"])[0] == row["label"] for row in judged)


def test_a_batch_of_pairs_is_chosen_and_rejected_in_turn(tokenizer: Any) -> None:
    batch = next(Batches(get_preference_dataset(PAIRED, tokenizer), PAIRED, pack_preferences))
    assert batch.num_seqs == 16
    assert batch["pair_ids"].tolist() == [i // 2 for i in range(16)]
    assert batch["is_chosen"].tolist() == [True, False] * 8
    assert (batch["row_ids"].dtype, batch["input_ids"].dtype, batch["loss_mask"].dtype) == (
        torch.int64,
        torch.int64,
        torch.bool,
    )
    rows = generate_pairs("test")
    for i in range(16):
        row = rows[int(batch["row_ids"][i])]
        tokens = batch.token_index([i])
        trained = batch["loss_mask"][tokens]
        answer = row["chosen" if i % 2 == 0 else "rejected"]["content"]
        assert tokenizer.decode(batch["input_ids"][tokens][trained]) == answer + "<|endoftext|>"
        prompt = f"<|user|>{row['messages'][0]['content']}<|assistant|>"
        assert tokenizer.decode(batch["input_ids"][tokens][~trained]) == prompt


def test_a_batch_of_judged_completions_has_their_labels(tokenizer: Any) -> None:
    batch = next(Batches(get_preference_dataset(JUDGED, tokenizer, paired=False), JUDGED, pack_preferences))
    rows = generate_judged("test")
    assert batch["kto_label"].tolist() == [rows[int(i)]["label"] for i in batch["row_ids"]]
    assert batch["kto_label"].dtype == torch.bool
    assert "pair_ids" not in batch


def judged_rows(size: int) -> Any:
    """Row i has the prompt [i, i], 3 + i tokens of completion, and a label that is true for even i."""
    rows = [
        {"prompt_ids": [i, i], "completion_ids": list(range(100 * i, 100 * i + 3 + i)), "kto_label": i % 2 == 0}
        for i in range(size)
    ]
    return Dataset.from_list([{**row, "row_id": i} for i, row in enumerate(rows)])


@pytest.mark.parametrize("size", [6, 7])
def test_the_mismatched_completion_is_of_the_row_half_a_data_set_away(size: int) -> None:
    rows = judged_rows(size)
    for i, row in enumerate(with_mismatched(rows)):
        assert row["mismatched_ids"] == rows[(i + size // 2) % size]["completion_ids"]
        assert row["completion_ids"] == rows[i]["completion_ids"]


def test_judged_rows_are_packed_with_their_own_and_a_mismatched_completion_cut_at_its_end() -> None:
    rows = list(with_mismatched(judged_rows(4)))
    batch = pack_judged(rows[:2], max_length=5)
    starts = batch.cu_seqlens.tolist()
    sequences = [batch["input_ids"][a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert sequences == [
        [0, 0, 0, 1, 2],
        [0, 0, 200, 201, 202],  # 5 tokens of completion, cut to the 3 that fit
        [1, 1, 100, 101, 102, 103],  # its own completion is never cut
        [1, 1, 300, 301, 302],
    ]
    assert batch["mismatched"].tolist() == [False, True, False, True]
    assert batch["kto_label"].tolist() == [True, True, False, False]
    assert batch["row_ids"].tolist() == [0, 0, 1, 1]
    assert pack_judged(rows[:1], max_length=1)["input_ids"].tolist() == [0, 0, 0, 1, 2, 0, 0, 200]
    assert len(pack_judged(rows[:1])["input_ids"]) == 5 + 2 + 5


def test_a_stream_of_pairs_from_several_sources_resumes_with_the_batch_that_came_next(
    tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}?", "chosen": str(i), "rejected": "no"} for i in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(
        batch_size=4,
        sources=[
            SourceConfig(str(tmp_path / "a.jsonl"), type="chatml.prompt_pairs", weight=1.0),
            SourceConfig("arithmetic_pairs", type="chat_template.default", split="test", weight=3.0),
        ],
    )
    assert config.describe() == f"{tmp_path / 'a.jsonl'} + arithmetic_pairs"
    unbroken = Batches(get_preference_dataset(config, tokenizer), config, pack_preferences)
    expected = [next(unbroken)["input_ids"].tolist() for _ in range(60)]
    first = Batches(get_preference_dataset(config, tokenizer), config, pack_preferences)
    for _ in range(41):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = Batches(get_preference_dataset(config, tokenizer), config, pack_preferences)
    second.load_state_dict(state)
    assert [next(second)["input_ids"].tolist() for _ in range(19)] == expected[41:]


def test_pairs_over_the_limit_are_dropped_by_their_longer_completion(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1?", "chosen": "1", "rejected": "1" * n} for n in (1, 30, 3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(path=str(tmp_path / "a.jsonl"), type="user_defined.default")
    lengths = [len(r["prompt_ids"]) + len(r["rejected_ids"]) for r in get_preference_dataset(config, tokenizer)]
    limited = DatasetConfig(path=config.path, type=config.type, max_length=lengths[1] - 1)
    kept = get_preference_dataset(limited, tokenizer)
    assert [row["row_id"] for row in kept] == [0, 2]
    assert f"row 1 ({lengths[1]} tokens)" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [
        ((3, 5), (0.0, 0.0), (3, 5)),  # every row once
        ((3, 5), (1.0, 1.0), (5, 5)),  # the shorter one starts again
        ((100, 10), (0.5, 0.5), (100, 100)),
        ((100, 10), (3.0, 1.0), (100, 33)),
        ((10, 10, 10), (1.0, 2.0, 7.0), (10, 20, 70)),
    ],
)
def test_a_mixture_follows_its_weights_and_leaves_no_row_out(
    sizes: tuple[int, ...], weights: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    parts = [[(k, i) for i in range(size)] for k, size in enumerate(sizes)]
    mixture = Mixture(parts, weights, [str(k) for k in range(len(parts))])
    rows = [mixture[i] for i in range(len(mixture))]
    assert tuple(Counter(k for k, _ in rows)[k] for k in range(len(sizes))) == counts
    assert set(rows) == {row for part in parts for row in part}
    seen = Counter(rows)
    for k, size in enumerate(sizes):
        assert {seen[k, i] for i in range(size)} <= {counts[k] // size, -(-counts[k] // size)}
    for outside in (-1, len(mixture)):
        with pytest.raises(IndexError):
            mixture[outside]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([SourceConfig("a", weight=1.0), SourceConfig("b")], "give each a weight above 0, or give no weights"),
        ([SourceConfig("a", weight=-1.0), SourceConfig("b", weight=2.0)], "give each a weight above 0"),
        ([SourceConfig("a"), SourceConfig()], r"sources\[1\] has no path"),
    ],
)
def test_sources_that_do_not_add_up_are_refused(sources: list[SourceConfig], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DatasetConfig(sources=sources).parts()
