"""Group-relative advantages, packed GAE and whitening: float64 oracles and properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Guarded, gae_oracle, group_oracle

from megarl.ops import torch_twins
from megarl.ops.advantage import GROUP_MODES, gae_packed, group_advantage, moments, moments_merge, whiten
from megarl.ops.native import _C, where
from megarl.types import cu_seqlens_of

MODES = st.sampled_from(GROUP_MODES)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=24), MODES, st.integers(1, 3), st.booleans(), st.integers(0, 99)
)
def test_group_advantages_match_the_oracle_for_any_grouping(ids, mode, columns, each, seed):
    rewards = torch.randn(len(ids), columns, generator=torch.Generator().manual_seed(seed))
    aggregation = "normalize_then_sum" if each else "sum_then_normalize"
    got = group_advantage(rewards, torch.tensor(ids), mode=mode, aggregation=aggregation)
    np.testing.assert_allclose(got, group_oracle(rewards.numpy(), ids, mode, 1e-6, each), rtol=1e-4, atol=1e-5)
    twin = torch_twins.group_advantage(rewards, torch.tensor(ids), mode=mode, aggregation=aggregation)
    torch.testing.assert_close(got, twin, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), MODES, st.randoms(use_true_random=False))
def test_a_shuffled_batch_gives_the_same_bits_shuffled(ids, mode, random):
    rewards = torch.tensor([random.choice([0.0, 1.0, 0.25]) for _ in ids])
    order = list(range(len(ids)))
    random.shuffle(order)
    plain = group_advantage(rewards, torch.tensor(ids), mode=mode)
    assert torch.equal(group_advantage(rewards[order], torch.tensor(ids)[order], mode=mode), plain[order])


def test_equal_rewards_and_groups_of_one_have_no_advantage_and_nan_stays_in_its_group():
    ids = torch.tensor([7, 7, 7, 1, 2, 2])
    rewards = torch.tensor([1.0, 1.0, 1.0, 5.0, torch.nan, 0.0])
    for mode in GROUP_MODES:
        got = group_advantage(rewards, ids, mode=mode)
        assert (got[:4] == 0).all()
        assert got[4:].isnan().all()
    assert group_advantage(torch.empty(0), torch.empty(0).long()).shape == (0,)


def packed(lengths, seed=0, masked=0.3):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    cu = cu_seqlens_of(torch.tensor(lengths, dtype=torch.int64))
    mask = torch.rand(tokens, generator=generator) >= masked
    return torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator), mask, cu


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_gae_matches_its_definition(lengths, gamma, lam, extras, masked):
    rewards, values, mask, cu = packed(lengths, masked=masked)
    lambdas, bootstrap = [lam] * len(lengths), [0.0] * len(lengths)
    more = {"lam": lam}
    if extras:
        lambdas = [lam / (i + 1) for i in range(len(lengths))]
        bootstrap = [0.5 - i for i in range(len(lengths))]
        more = {"lam": torch.tensor(lambdas), "bootstrap": torch.tensor(bootstrap)}
    got = gae_packed(rewards, values, mask, cu, gamma=gamma, **more)
    want = gae_oracle(rewards, values, mask, cu, gamma, lambdas, bootstrap)
    twin = torch_twins.gae_packed(rewards, values, mask, cu, gamma=gamma, **more)
    for a, b, c in zip(got, want, twin, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)


def test_gae_of_a_sequence_does_not_depend_on_its_neighbours_or_on_threads():
    rewards, values, mask, cu = packed([4000, 1, 0, 3000], seed=3)
    got = gae_packed(rewards, values, mask, cu, gamma=0.99, lam=0.95)
    alone = gae_packed(
        rewards[4001:], values[4001:], mask[4001:], cu_seqlens_of(torch.tensor([3000])), gamma=0.99, lam=0.95
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        again = gae_packed(rewards, values, mask, cu, gamma=0.99, lam=0.95)
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(got, alone, again, strict=True):
        assert torch.equal(a[4001:], b)
        assert torch.equal(a, c)


def test_nan_in_a_masked_token_or_another_sequence_has_no_effect():
    rewards, values, mask, cu = packed([5, 5], masked=0.0)
    mask[2] = False
    clean = gae_packed(rewards, values, mask, cu)[0]
    rewards[2], values[7] = torch.nan, torch.nan
    dirty = gae_packed(rewards, values, mask, cu)[0]
    assert torch.equal(clean[:5], dirty[:5])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9000), st.sampled_from([0.0, 0.5, 1.0]), st.lists(st.integers(0, 9000), max_size=3))
def test_moments_match_and_any_split_merges_to_the_whole(tokens, masked, cuts):
    x = torch.randn(tokens, generator=torch.Generator().manual_seed(tokens)) * 3 + 100
    mask = torch.rand(tokens, generator=torch.Generator().manual_seed(1)) >= masked
    got = moments(x, mask)
    torch.testing.assert_close(got, torch_twins.moments(x, mask), rtol=1e-10, atol=1e-8)
    bounds = [0, *sorted(min(c, tokens) for c in cuts), tokens]
    parts = [moments(x[a:b], mask[a:b]) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(moments_merge(torch.stack(parts)), got, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_whitening_gives_mean_0_and_variance_1_and_matches_the_twin(shift_mean, clip):
    x, mask = torch.randn(10000) * 4 - 7, torch.rand(10000) < 0.7
    x[~mask] = torch.nan
    got = whiten(x, mask, shift_mean=shift_mean, clip=clip)
    torch.testing.assert_close(got, torch_twins.whiten(x, mask, shift_mean=shift_mean, clip=clip), rtol=1e-5, atol=1e-5)
    assert (got[~mask] == 0).all()
    if clip is None:
        whitened = got[mask].double()
        assert abs(whitened.var() - 1) < 1e-5
        assert abs(whitened.mean() - (0 if shift_mean else x[mask].double().mean())) < 1e-5


def test_whitening_two_values_gives_their_sample_variance():
    whitened = whiten(torch.tensor([3.0, 9.0, 7.0]), torch.tensor([True, False, True]))
    torch.testing.assert_close(whitened, torch.tensor([-(0.5**0.5), 0.0, 0.5**0.5]))


def test_whitening_nothing_or_one_value_gives_zeros():
    assert (whiten(torch.full((3,), torch.nan), torch.zeros(3, dtype=torch.bool)) == 0).all()
    assert whiten(torch.tensor([5.0]), torch.ones(1, dtype=torch.bool)).item() == 0
    assert whiten(torch.empty(0), torch.empty(0, dtype=torch.bool)).shape == (0,)


def test_kernels_fill_their_outputs_and_write_nothing_else():
    rewards, values, mask, cu = packed([7, 0, 6])
    here, lam = where(rewards), torch.ones(1)
    outs = [Guarded((13,), torch.float32) for _ in range(3)]
    inputs = [t.data_ptr() for t in (rewards, values, mask, cu)]
    _C.gae(here, 3, *inputs, 0, 1.0, lam.data_ptr(), 0, outs[0].tensor.data_ptr(), outs[1].tensor.data_ptr())
    partials, result = Guarded((1, 3), torch.float64), Guarded((3,), torch.float64)
    _C.moments(here, 13, inputs[0], inputs[2], partials.tensor.data_ptr(), result.tensor.data_ptr())
    _C.whiten(here, 13, inputs[0], inputs[2], result.tensor.data_ptr(), 0.0, False, 9.0, outs[2].tensor.data_ptr())
    ids, order = torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1])
    advantage = Guarded((3,), torch.float32)
    _C.group_advantage(
        *(here, 3, 2, inputs[0], order.data_ptr(), ids.data_ptr(), 0, 1e-6, True, advantage.tensor.data_ptr())
    )
    for buffer in (*outs, partials, result, advantage):
        assert buffer.check().isfinite().all()
