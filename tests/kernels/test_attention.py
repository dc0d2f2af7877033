"""Attention over packed sequences on CPU and its gradients against the plain-torch twin in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.cpu import torch_twins
from megarl.cpu.attention import Sequences, packed_attention


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(groups: list[tuple[int, list[int]]]) -> tuple[Sequences, int]:
    """Builds sequences from groups of (prompt length, completion lengths), and returns them with the number of tokens.

    Members of a group share its prompt. The indices of the tokens are shuffled.
    """
    rows: list[int] = []
    bounds, skipped, tokens = [0], [], 0
    for prompt_length, lengths in groups:
        prompt = list(range(tokens, tokens + prompt_length))
        tokens += prompt_length
        for member, length in enumerate(lengths):
            rows += [*prompt, *range(tokens, tokens + length)]
            tokens += length
            bounds.append(len(rows))
            skipped.append(prompt_length if member else 0)
    shuffled = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
    return Sequences(
        torch.tensor(bounds).int(), shuffled[torch.tensor(rows).long()], torch.tensor(skipped).long()
    ), tokens


def check(sequences: Sequences, tokens: int, heads: int, kv_heads: int, dim: int, spread: float = 1.0) -> None:
    inputs = [
        randn(tokens, n, dim, seed=n + i) * s
        for i, (n, s) in enumerate(((heads, spread), (kv_heads, 1), (kv_heads, 1)))
    ]
    gradient = randn(tokens, heads, dim, seed=7)
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    got = packed_attention(*leaves, sequences, dim**-0.5)
    expected = torch_twins.packed_attention(*exact, sequences, dim**-0.5)
    torch.testing.assert_close(got.double(), expected, atol=3e-6 * spread, rtol=3e-6)
    grads = torch.autograd.grad(got, leaves, gradient)
    exact_grads = torch.autograd.grad(expected, exact, gradient.double())
    # The relative error of the weights grows with the scores, and keys' gradients are their sum times queries.
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(grad.double(), exact_grad, atol=2e-5 * spread**2, rtol=2e-5)


LENGTHS = st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 16, 17, 40]), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    groups=st.lists(st.tuples(st.sampled_from([0, 1, 7, 16, 33]), LENGTHS), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2), group=st.integers(1, 3), dim=st.sampled_from([1, 8, 16, 24, 64]),
    spread=st.sampled_from([1.0, 30.0]),
)  # fmt: skip
def test_values_and_gradients_match_float64(groups, kv_heads, group, dim, spread):
    check(*grouped(groups), kv_heads * group, kv_heads, dim, spread)


@pytest.mark.parametrize("groups", [[(0, [200])], [(150, [90, 64, 65])]])
def test_sequences_longer_than_a_block_of_queries_match_float64(groups):
    check(*grouped(groups), 4, 2, 32)


def test_a_token_sees_no_other_sequence_and_no_later_token():
    sequences, tokens = grouped([(5, [20, 9]), (0, [33])])
    inputs = [randn(tokens, n, 16, seed=n) for n in (4, 2, 2)]
    whole = packed_attention(*inputs, sequences, 0.25)
    first = sequences.rows[:25]
    alone = Sequences(torch.tensor([0, 18]).int(), torch.arange(18), torch.tensor([0]))
    prefix_alone = packed_attention(*(x[first[:18]] for x in inputs), alone, 0.25)
    assert torch.equal(whole[first[:18]], prefix_alone)  # to the bit


def test_the_number_of_threads_changes_no_bit():
    sequences, tokens = grouped([(40, [60] * 8)] * 4)
    inputs = [randn(tokens, n, 16, seed=n).requires_grad_() for n in (4, 2, 2)]
    threads, results = torch.get_num_threads(), []
    for number in (1, 3):
        torch.set_num_threads(number)
        out = packed_attention(*inputs, sequences, 0.25)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def sequences_of(bounds: list[int], rows: list[int], skipped: list[int]) -> Sequences:
    return Sequences(torch.tensor(bounds).int(), torch.tensor(rows), torch.tensor(skipped))


@pytest.mark.parametrize(
    ("bounds", "rows", "skipped", "message"),
    [
        ([0, 2, 4], [0, 1, 2], [0, 0], "ends at 4, but there are 3 tokens"),
        ([0, 2], [0, 1], [0, 0], "skipped has shape"),
        ([1, 2], [0, 1], [0], "must rise from 0"),
        ([0, 3, 2], [0, 1], [0, 0], "must rise from 0"),
        ([0, 2**31 - 1, -(2**31), 2], [0, 1], [0, 0, 0], "must rise from 0"),
        ([0, 2], [0, 1], [3], "between 0 and the sequences' lengths"),
        ([0, 2, 4], [0, 1, -5, 2], [0, 1], "each once"),
        ([0, 2, 4], [0, 1, 1, 2], [0, 0], "each once"),
        ([0, 2, 4], [0, 1, 5, 2], [0, 1], "each once"),
        ([0, 2], [0, -1], [0], "each once"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(bounds, rows, skipped, message):
    with pytest.raises(ValueError, match=message):
        sequences_of(bounds, rows, skipped)


@pytest.mark.parametrize(
    ("query", "key", "value", "message"),
    [
        ((3, 4, 8), (2, 2, 8), (2, 2, 8), "query has shape"),
        ((2, 4, 8), (2, 3, 8), (2, 3, 8), "heads must be a multiple"),
        ((2, 4, 8), (2, 2, 8), (2, 2, 7), "value has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(query, key, value, message):
    with pytest.raises(ValueError, match=message):
        packed_attention(
            *(randn(*shape, seed=0) for shape in (query, key, value)), sequences_of([0, 2], [0, 1], [0]), 1.0
        )


def test_another_dtype_is_refused():
    tensors = [randn(2, 2, 8, seed=0).double() for _ in range(3)]
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        packed_attention(*tensors, sequences_of([0, 2], [0, 1], [0]), 1.0)
