"""Microbatches: every sequence once, under the budget, the same number on every rank; shifts and attention blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.actor.attention import PackedAttention, packed_sequences
from megarl.actor.microbatch import build, partition, shift_left, shift_right
from megarl.knobs import UserError
from megarl.types import PackedBatch, cu_seqlens_of

lengths_lists = st.lists(st.integers(1, 64), min_size=1, max_size=40)


@given(lengths_lists, st.integers(1, 4), st.integers(64, 200))
def test_a_partition_holds_every_sequence_once_within_the_budget(lengths: list[int], dp: int, budget: int) -> None:
    plan = partition(lengths, dp, budget)
    assert len({len(rank) for rank in plan}) == 1, "ranks have different numbers of microbatches"
    assert sorted(i for rank in plan for mb in rank for i in mb) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in mb) <= budget for rank in plan for mb in rank)
    loads = [sum(lengths[i] for mb in rank for i in mb) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_a_sequence_over_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"70 tokens .*max_tokens_per_mb=64"):
        partition([3, 70], 1, 64)


@given(lengths_lists)
def test_shifts_stay_inside_their_sequence(lengths: list[int]) -> None:
    cu_seqlens = cu_seqlens_of(torch.tensor(lengths))
    values = torch.arange(1, sum(lengths) + 1)
    left, right = shift_left(values, cu_seqlens), shift_right(values, cu_seqlens)
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        assert left[start:stop].tolist() == [*values[start + 1 : stop].tolist(), 0]
        assert right[start:stop].tolist() == [0, *values[start : stop - 1].tolist()]


def test_labels_are_the_next_tokens_and_none_at_a_sequence_end() -> None:
    batch = PackedBatch(torch.tensor([0, 3, 4]), {"input_ids": torch.tensor([7, 8, 9, 5])})
    assert build(batch, [0, 1], 1.0, torch.device("cpu")).labels.tolist() == [8, 9, -1, -1]


def test_an_empty_microbatch_has_a_sequence_and_no_weight() -> None:
    batch = PackedBatch(torch.tensor([0, 3, 4]), {"input_ids": torch.tensor([7, 8, 9, 5])})
    empty = build(batch, [], 0.5, torch.device("cpu"))
    assert empty.weight == 0.0
    assert empty.indices == []
    assert empty.batch.total_tokens == 3


@given(lengths_lists)
def test_blocks_hold_every_token_once_and_half_of_them_at_least_are_tokens(lengths: list[int]) -> None:
    packed = packed_sequences(cu_seqlens_of(torch.tensor(lengths)))
    held = torch.cat([block.gather[block.valid] for block in packed.blocks])
    assert sorted(held.tolist()) == list(range(sum(lengths)))
    assert torch.equal(held[packed.restore], torch.arange(sum(lengths)))
    slots = sum(block.num_seqs * block.length for block in packed.blocks)
    assert slots < 2 * sum(lengths) or slots == sum(lengths)
    assert packed.positions is not None
    assert packed.positions.tolist() == [p for n in lengths for p in range(n)]


def test_packed_attention_is_attention_of_each_sequence_alone() -> None:
    class Config:
        kv_channels = 8

    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 17, 16, 3])
    total = int(lengths.sum())
    query, key, value = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    out = PackedAttention(Config())(query, key, value, None, packed_seq_params=packed_sequences(cu_seqlens_of(lengths)))
    expected = []
    for q, k, v in zip(*(x.split(lengths.tolist()) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-6, rtol=1e-5)
