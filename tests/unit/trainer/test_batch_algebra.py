"""The batch algebra against the microbatches that the trainer really plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import cli
from megarl.actor.batch.balance import SequenceCost
from megarl.actor.batch.microbatch import plan_microbatches
from megarl.actor.policy import update_in_minibatches
from megarl.algorithms import KTOConfig
from megarl.data.examples import pack_preferences
from megarl.trainer.batch_algebra import BatchAlgebra, batch_of
from megarl.types import PackedBatch, cu_seqlens_of

COST = SequenceCost(100.0, 1.0)


class Recorder:
    """Plans the microbatches of each optimizer step as the real engine does, and trains nothing."""

    def __init__(self, algebra: BatchAlgebra) -> None:
        self.algebra = algebra
        self.steps: list[tuple[PackedBatch, list[list[list[int]]]]] = []

    def train(self) -> Recorder:
        return self

    def train_batch(self, part: PackedBatch, *_: Any, **__: Any) -> dict[str, float]:
        algebra = self.algebra
        self.steps.append((part, plan_microbatches(part, COST, algebra.dp, algebra.max_tokens, algebra.multiple)))
        return {"skipped_steps": 0.0}


def packed(lengths: list[int]) -> PackedBatch:
    ids = torch.zeros(sum(lengths), dtype=torch.long)
    return PackedBatch(cu_seqlens_of(torch.tensor(lengths)), {"input_ids": ids})


def pairs(lengths: list[int]) -> PackedBatch:
    """A row for each length: prompt and completion have this many tokens together."""
    rows = [
        {"prompt_ids": [0], "chosen_ids": [0] * (n - 1), "rejected_ids": [0] * (n - 1), "row_id": i}
        for i, n in enumerate(lengths)
    ]
    return pack_preferences(rows)


def steps_of(algebra: BatchAlgebra, batch: PackedBatch) -> list[tuple[PackedBatch, list[list[list[int]]]]]:
    engine = Recorder(algebra)
    update_in_minibatches(engine, batch, algebra.minibatches, None, None, "logprobs")  # type: ignore[arg-type]
    return engine.steps


@st.composite
def algebras(draw: st.DrawFn) -> BatchAlgebra:
    """Batches that a run accepts: minibatches and replicas divide them."""
    minibatches, dp, samples = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = draw(st.integers(1, 5)) * minibatches * dp
    longest = draw(st.integers(2, 40))
    most = draw(st.integers(longest, 6 * longest))
    return BatchAlgebra(rows, samples, minibatches, dp, longest, most, multiple=draw(st.integers(1, 3)))


@settings(max_examples=200)
@given(algebras())
def test_the_trainer_divides_sequences_of_full_length_as_predicted(algebra: BatchAlgebra) -> None:
    steps = steps_of(algebra, packed([algebra.longest] * algebra.sequences))
    assert len(steps) == algebra.minibatches
    for part, replicas in steps:
        assert part.num_seqs == algebra.per_update
        assert [sum(map(len, microbatches)) for microbatches in replicas] == [algebra.per_replica] * algebra.dp
        assert [len(microbatches) for microbatches in replicas] == [algebra.microbatches] * algebra.dp
        assert max(len(indices) for microbatches in replicas for indices in microbatches) <= algebra.per_microbatch


@settings(max_examples=200)
@given(algebras(), st.data())
def test_no_shorter_sequence_is_lost_and_no_microbatch_is_too_large(algebra: BatchAlgebra, data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.integers(1, algebra.longest), min_size=algebra.sequences, max_size=algebra.sequences)
    )
    seen = 0
    for part, replicas in steps_of(algebra, packed(lengths)):
        sizes = part.lengths.tolist()
        assert sorted(i for microbatches in replicas for m in microbatches for i in m) == list(range(part.num_seqs))
        assert all(sum(sizes[i] for i in m) <= algebra.max_tokens for microbatches in replicas for m in microbatches)
        counts = {len(microbatches) for microbatches in replicas}
        assert len(counts) == 1
        assert counts.pop() % algebra.multiple == 0
        seen += part.num_seqs
    assert seen == algebra.sequences


@settings(max_examples=100)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(3, 30), st.integers(2, 9))
def test_the_two_sequences_of_a_pair_stay_together(rows: int, dp: int, longest: int, fits: int) -> None:
    algebra = BatchAlgebra(rows * dp, 2, 1, dp, longest, fits * longest, together=2)
    ((part, replicas),) = steps_of(algebra, pairs([longest] * algebra.rows))
    assert part.num_seqs == algebra.sequences
    assert [sum(map(len, microbatches)) for microbatches in replicas] == [algebra.per_replica] * dp
    assert [len(microbatches) for microbatches in replicas] == [algebra.microbatches] * dp


def test_the_configuration_determines_the_algebra() -> None:
    algebra = batch_of(cli.composed(["+experiment=grpo_70b", "parallel.vpp_size=2"]))
    assert algebra == BatchAlgebra(128, 16, 4, 2, 4608, 9216, multiple=4)
    assert (algebra.per_microbatch, algebra.microbatches) == (2, 128)
    config = cli.composed(["+experiment=dpo_8b"])
    assert batch_of(config) == BatchAlgebra(128, 2, 1, 4, 2048, 8192, together=2)
    assert batch_of(replace(config, algorithm=KTOConfig())).sequences == 128  # mismatched answers are not trained on
