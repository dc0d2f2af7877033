"""Microbatches: each sequence once, within the token limit, as many on every rank; shifts and attention blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.actor.batch.balance import SequenceCost
from megarl.actor.batch.microbatch import build_microbatch, last_positions, partition, plan_microbatches, shift_right
from megarl.actor.batch.shared_prefix import share
from megarl.actor.model.attention.packed import WHOLE, PackedAttention, pack_in_blocks
from megarl.knobs import UserError
from megarl.types import PackedBatch, cu_seqlens_of

lengths_lists = st.lists(st.integers(1, 64), min_size=1, max_size=40)


@given(lengths_lists, st.integers(1, 4), st.integers(64, 200), st.integers(1, 3))
def test_a_partition_holds_every_sequence_once_within_the_budget(
    lengths: list[int], dp: int, budget: int, multiple: int
) -> None:
    plan = partition(lengths, [float(n) for n in lengths], dp, budget, multiple)
    counts = {len(rank) for rank in plan}
    assert len(plan) == dp
    assert len(counts) == 1, "ranks have different numbers of microbatches"
    assert counts.pop() % multiple == 0
    assert sorted(i for rank in plan for mb in rank for i in mb) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in mb) <= budget for rank in plan for mb in rank)
    loads = [sum(lengths[i] for mb in rank for i in mb) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_a_sequence_over_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"70 tokens .*max_tokens_per_mb=64"):
        partition([3, 70], [3.0, 70.0], 1, 64)


def test_microbatches_of_a_rank_are_even() -> None:
    lengths = [40, 40, 8, 8, 8, 8, 8]
    (rank,) = partition(lengths, [float(n) for n in lengths], 1, 64)
    assert [sum(lengths[i] for i in mb) for mb in rank] == [64, 56]
    lengths = [8, 8, 4, 4, 4, 4]  # evened out, each microbatch has exactly the budget
    (rank,) = partition(lengths, [float(n * n) for n in lengths], 1, 16)
    assert [sorted(lengths[i] for i in mb) for mb in rank] == [[4, 4, 8], [4, 4, 8]]


def grouped(sizes: list[tuple[int, list[int]]], key: str = "group_ids", vocab: int = 50) -> PackedBatch:
    """Builds groups from (prompt length, completion lengths). Sequences of the groups alternate."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for group, (prompt_length, completions) in enumerate(sizes):
        prompt = torch.randint(0, vocab, (prompt_length,), generator=generator)
        for i, length in enumerate(completions):
            completion = torch.randint(0, vocab, (length,), generator=generator)
            completion[:1] = i  # completions differ from their first token on
            sequences.append((i, group, torch.cat([prompt, completion])))
    sequences.sort(key=lambda entry: entry[:2])
    lengths = torch.tensor([len(ids) for *_, ids in sequences])
    groups = torch.tensor([group for _, group, _ in sequences])
    return PackedBatch(cu_seqlens_of(lengths), {"input_ids": torch.cat([ids for *_, ids in sequences])}, {key: groups})


COST = SequenceCost(linear=100.0, quadratic=1.0)


def test_groups_stay_together_and_their_prompt_counts_once() -> None:
    batch = grouped([(20, [5, 5, 5]), (10, [9, 9, 9]), (4, [2, 2])])
    plan = plan_microbatches(batch, COST, 1, 40, shared=True)
    groups = [batch["group_ids"][mb].tolist() for rank in plan for mb in rank if mb]
    assert sorted(g for mb in groups for g in set(mb)) == [0, 1, 2], "a group is in several microbatches"
    for mb in plan[0]:
        tokens = share(batch.select(mb)).source.numel() if mb else 0
        assert tokens <= 40


def test_a_group_that_does_not_fit_is_cut_with_the_prompt_in_each_part() -> None:
    batch = grouped([(20, [9, 9, 9])])
    (rank,) = plan_microbatches(batch, COST, 1, 40, shared=True)
    assert sorted(len(mb) for mb in rank) == [1, 2]
    with pytest.raises(UserError, match="29 tokens does not fit"):
        plan_microbatches(batch, COST, 1, 28, shared=True)


@pytest.mark.parametrize("shared", [False, True])
def test_pairs_are_never_parted(shared: bool) -> None:
    batch = grouped([(3, [9, 4]), (2, [7, 7]), (5, [2, 12]), (1, [3, 3])], key="pair_ids")
    for dp in (1, 2, 3):
        for rank in plan_microbatches(batch, COST, dp, 30, shared=shared):
            for mb in rank:
                ids = batch["pair_ids"][mb].tolist()
                assert all(ids.count(i) == 2 for i in ids)
    with pytest.raises(UserError, match="does not fit"):
        plan_microbatches(batch, COST, 1, 16, shared=shared)


def test_the_model_is_given_each_common_beginning_once() -> None:
    batch = grouped([(6, [3, 1, 2]), (4, [2, 2, 2])])
    shared = share(batch)
    assert shared.source.numel() == 6 + 3 + 1 + 2 + 4 + 2 + 2 + 2
    assert torch.equal(batch["input_ids"][shared.source][shared.rows], batch["input_ids"])
    position = torch.cat([torch.arange(n) for n in batch.lengths.tolist()])
    packed = pack_in_blocks(batch.cu_seqlens, torch.device("cpu"), shared=shared)
    assert packed.positions is not None
    assert torch.equal(packed.positions[shared.rows], position)


def test_shared_prompts_need_to_know_the_groups() -> None:
    batch = PackedBatch(torch.tensor([0, 3, 4]), {"input_ids": torch.tensor([7, 8, 9, 5])})
    with pytest.raises(UserError, match=r"shared_prefix=true needs the batch's group_ids"):
        plan_microbatches(batch, COST, 1, 64, shared=True)


@given(lengths_lists)
def test_a_shift_stays_inside_its_sequence(lengths: list[int]) -> None:
    cu_seqlens = cu_seqlens_of(torch.tensor(lengths))
    values = torch.arange(1, sum(lengths) + 1)
    right = shift_right(values, last_positions(cu_seqlens))
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        assert right[start:stop].tolist() == [0, *values[start : stop - 1].tolist()]


def test_labels_are_the_next_tokens_and_none_at_a_sequence_end() -> None:
    batch = PackedBatch(torch.tensor([0, 3, 4]), {"input_ids": torch.tensor([7, 8, 9, 5])})
    labels = build_microbatch(batch, [0, 1], 1.0, torch.device("cpu"), WHOLE, None, pack_in_blocks).labels
    assert labels.ids.tolist() == [8, 9, -1, -1]
    assert labels.rows.tolist() == [0, 1]


def test_an_empty_microbatch_has_a_sequence_and_no_weight() -> None:
    batch = PackedBatch(torch.tensor([0, 3, 4]), {"input_ids": torch.tensor([7, 8, 9, 5])})
    empty = build_microbatch(batch, [], 0.5, torch.device("cpu"), WHOLE, None, pack_in_blocks)
    assert empty.weight == 0.0
    assert empty.indices == []
    assert empty.batch.total_tokens == 3


@given(lengths_lists)
def test_blocks_hold_every_token_once_and_half_of_them_at_least_are_tokens(lengths: list[int]) -> None:
    packed = pack_in_blocks(cu_seqlens_of(torch.tensor(lengths)), torch.device("cpu"))
    tokens = torch.cat([block.queries[block.valid] for block in packed.blocks])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    assert torch.equal(tokens[packed.restore], torch.arange(sum(lengths)))
    slots = sum(block.num_seqs * block.length for block in packed.blocks)
    assert slots < 2 * sum(lengths) or slots == sum(lengths)
    assert packed.positions is not None
    assert packed.positions.tolist() == [p for n in lengths for p in range(n)]


class HeadsOfEight:
    kv_channels = 8
    context_parallel_size = 1


def attention_alone(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """Computes causal attention of each sequence separately, `[tokens, heads * dim]`."""
    expected = []
    for q, k, v in zip(*(x.split(lengths.tolist()) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
    return torch.cat(expected)


def test_packed_attention_is_attention_of_each_sequence_alone() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 17, 16, 3])
    total = int(lengths.sum())
    query, key, value = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    packed = pack_in_blocks(cu_seqlens_of(lengths), torch.device("cpu"))
    out = PackedAttention(HeadsOfEight())(query, key, value, None, packed_seq_params=packed)
    torch.testing.assert_close(out, attention_alone(query, key, value, lengths), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("prompts", [(40, 3), (5, 70), (2100, 1)])
def test_attention_after_a_shared_prompt_is_attention_of_each_sequence_alone(prompts: tuple[int, int]) -> None:
    """Cases: long completions after a short prompt, and short completions after a long prompt.

    In the second case only one sequence of the group has queries in the prompt, unless masks would be too large.
    """
    batch = grouped([(prompts[0], [60, 3, 9, 3]), (prompts[1], [8, 200, 8]), (1, [1])])
    shared = share(batch)
    packed = pack_in_blocks(batch.cu_seqlens, torch.device("cpu"), shared=shared)
    torch.manual_seed(0)
    tokens = shared.source.numel()
    query, key, value = (torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    out = PackedAttention(HeadsOfEight())(query, key, value, None, packed_seq_params=packed)
    full = [x[shared.rows] for x in (query, key, value)]
    expected = attention_alone(*full, batch.lengths)[shared.source]  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    gradient = torch.randn_like(out)
    gradients, expected_gradients = (torch.autograd.grad(x, (query, key, value), gradient) for x in (out, expected))
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-4)
    masked = [block for block in packed.blocks if block.mask is not None]
    assert masked
    assert all(block.length < block.mask.shape[-1] <= 2048 for block in masked)


def test_a_sequence_that_is_another_ones_has_no_queries() -> None:
    batch = grouped([(9, [4, 4])])
    batch["input_ids"][13:] = batch["input_ids"][:13]
    packed = pack_in_blocks(batch.cu_seqlens, torch.device("cpu"), shared=share(batch))
    assert [(block.num_seqs, block.length, block.mask) for block in packed.blocks] == [(1, 13, None)]
