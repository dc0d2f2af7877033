"""Balanced work over ranks: largest differencing, the FLOP model, and the balance on long-tailed lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config

from megarl.actor.batch.balance import SequenceCost, imbalance, karmarkar_karp
from megarl.actor.batch.microbatch import partition
from tests.conftest import random_model

costs_lists = st.lists(st.floats(0, 1e6), max_size=60)


@given(costs_lists, st.integers(1, 9))
def test_every_index_is_in_one_part_and_sums_differ_by_at_most_the_largest_cost(costs: list[float], parts: int) -> None:
    groups = karmarkar_karp(costs, parts)
    assert len(groups) == parts
    assert sorted(i for group in groups for i in group) == list(range(len(costs)))
    sums = [sum(costs[i] for i in group) for group in groups]
    assert max(sums) - min(sums) <= max(costs, default=0.0) * (1 + 1e-9) + 1e-6


def by_all_parts(costs: list[float], parts: int) -> list[list[int]]:
    """Largest differencing as the paper says it: solutions of all parts, empty ones too."""
    found = [
        (-cost if parts > 1 else 0.0, i, [*[(0.0, [])] * (parts - 1), (cost, [i])]) for i, cost in enumerate(costs)
    ]
    while len(found) > 1:
        (_, order, wide), (_, _, other), *found = sorted(found, key=lambda solution: solution[:2])
        joined = [(a + b, m + n) for (a, m), (b, n) in zip(wide, reversed(other), strict=True)]
        joined.sort(key=lambda part: part[0])
        found.append((joined[0][0] - joined[-1][0], order, joined))
    return [sorted(members) for _, members in reversed(found[0][2])]


@given(st.lists(st.integers(1, 9) | st.floats(0.1, 1e6), min_size=1, max_size=40), st.integers(1, 12))
def test_leaving_out_empty_parts_changes_no_group(costs: list[float], parts: int) -> None:
    assert karmarkar_karp(costs, parts) == by_all_parts(costs, parts)


def test_differencing_beats_largest_first() -> None:
    """Textbook case: 8, 7, 6, 5, 4 in two parts. Largest first adds each number to the lighter part."""
    costs = [8.0, 7.0, 6.0, 5.0, 4.0]
    largest_first = [0.0, 0.0]
    for cost in costs:
        largest_first[largest_first.index(min(largest_first))] += cost
    assert sorted(largest_first) == [13, 17]
    assert sorted(sum(costs[i] for i in group) for group in karmarkar_karp(costs, 2)) == [14, 16]


def test_the_cost_of_a_sequence_is_what_a_flop_counter_counts() -> None:
    """The counter counts all pairs of tokens in attention, but causal attention needs only half of them."""
    model = random_model("qwen3", tied=False, vocab_size=352)
    model.set_attn_implementation("eager")
    cost = SequenceCost.of(model.config)
    for tokens in (8, 64):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.long))
        counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
        attention = counts.pop("aten.bmm")  # includes the rotary angles
        assert sum(counts.values()) == cost.linear * tokens
        assert attention == pytest.approx(2 * cost.quadratic * tokens**2, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_the_most_loaded_rank_has_at_most_five_percent_more_work_on_long_tailed_lengths(ranks: int, seed: int) -> None:
    """512 completions with log-normal lengths up to 8k tokens, on a model whose attention cost matters."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (600 * torch.randn(512, generator=generator).exp()).clamp(32, 8192).long().tolist()
    cost = SequenceCost.of(Qwen3Config(hidden_size=1024, num_hidden_layers=28, intermediate_size=3072))
    costs = [cost(n) for n in lengths]
    plan = partition(lengths, costs, ranks, 16384)
    loads = [sum(costs[i] for mb in rank for i in mb) for rank in plan]
    assert imbalance(loads) <= 0.05
    in_order = [sum(costs[r * 512 // ranks : (r + 1) * 512 // ranks]) for r in range(ranks)]
    assert imbalance(loads) < imbalance(in_order)


def test_imbalance_is_the_excess_over_the_mean() -> None:
    assert imbalance([1.0, 3.0]) == 0.5
    assert imbalance([0.0, 0.0]) == 0.0
