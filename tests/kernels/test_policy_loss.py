"""The one-pass policy loss: values, gradients and metrics against the twin, values by hand and gradcheck."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Guarded

from megarl.ops import torch_twins
from megarl.ops.loss import (
    POLICY_LOSS_SUMS,
    PolicyLossSettings,
    policy_loss,
    policy_loss_metrics,
    segment_sum,
)
from megarl.ops.native import _C, where

CU = torch.tensor([0, 9, 9, 10, 40], dtype=torch.int32)


def batch(seed=0, dtype=torch.float64, scale=0.5):
    generator = torch.Generator().manual_seed(seed)
    logprob, advantage, *others = (torch.randn(40, generator=generator, dtype=dtype) for _ in range(5))
    old, ref, rollout = (logprob + scale * t for t in others)
    entropy = torch.rand(40, generator=generator, dtype=dtype)
    mask = torch.rand(40, generator=generator) < 0.7
    mask[9] = False  # masks the only token of its sequence
    more = {"ref_logprobs": ref, "rollout_logprobs": rollout, "cu_seqlens": CU}
    return logprob.requires_grad_(), old, advantage, mask, entropy.requires_grad_(), more


ALL_SETTINGS = [
    PolicyLossSettings(
        objective=objective, ratio=ratio, clip_high=0.28, dual_clip=dual, kl_estimator=kl, kl_coef=0.3,
        entropy_coef=0.05, correction=correction, correction_low=0.5, correction_high=1.5,
    )
    for objective, ratio, dual, (kl, correction) in itertools.product(
        ("clip", "cispo"), ("token", "sequence"), (None, 1.5),
        (("none", "none"), ("k1", "truncate"), ("k2", "mask"), ("k3", "truncate")),
    )
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ALL_SETTINGS)))
def test_every_combination_equals_the_twin_with_its_gradients_and_metrics(number):
    s = ALL_SETTINGS[number]
    logprob, old, advantage, mask, entropy, more = batch(number)
    upstream = torch.randn(40, dtype=torch.float64)
    results = []
    for op in (policy_loss, torch_twins.policy_loss):
        out = op(logprob, old, advantage, mask, settings=s, entropy=entropy, **more)
        grads = torch.autograd.grad((out.loss * upstream).sum(), (logprob, entropy))
        results.append((out.loss, out.sums, *grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("s", [s for s in ALL_SETTINGS if s.objective == "clip"][::3], ids=str)
def test_gradcheck_passes(s):
    logprob, old, advantage, mask, entropy, more = batch(5)
    assert torch.autograd.gradcheck(
        lambda a, b: policy_loss(a, old, advantage, mask, settings=s, entropy=b, **more).loss, (logprob, entropy)
    )


def test_one_token_of_each_kind_by_hand():
    ratios, advantages = [0.5, 1.1, 2.0, 0.5, 2.0, 9.0], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    logprob = torch.tensor(ratios).log().requires_grad_()
    zeros, advantage, mask = torch.zeros(6), torch.tensor(advantages), torch.ones(6, dtype=torch.bool)
    out = policy_loss(logprob, zeros, advantage, mask, settings=PolicyLossSettings(clip_high=0.3, dual_clip=3.0))
    torch.testing.assert_close(out.loss, torch.tensor([-0.5, -1.1, -1.3, 0.8, 2.0, 3.0]))
    out.loss.sum().backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([-0.5, -1.1, 0.0, 0.0, 2.0, 0.0]))
    metrics = policy_loss_metrics(out.sums)
    assert metrics["tokens"] == 6
    assert (metrics["clipped_low"], metrics["clipped_high"], metrics["dual_clipped"]) == (1 / 6, 1 / 6, 1 / 6)
    assert math.isclose(metrics["ratio_max"], 9, rel_tol=1e-6)
    assert math.isclose(metrics["approx_kl"], sum(r - 1 - math.log(r) for r in ratios) / 6, rel_tol=1e-5)


def test_the_sequence_ratio_is_the_geometric_mean_of_the_unmasked_tokens():
    logprob, old = torch.tensor([0.3, 9.0, 0.1]).requires_grad_(), torch.zeros(3)
    mask, cu = torch.tensor([True, False, True]), torch.tensor([0, 3], dtype=torch.int32)
    s = PolicyLossSettings(ratio="sequence", clip_high=0.5)
    out = policy_loss(logprob, old, torch.ones(3), mask, settings=s, cu_seqlens=cu)
    ratio = math.exp(0.2)
    torch.testing.assert_close(out.loss, torch.tensor([-ratio, 0.0, -ratio]))
    out.loss.sum().backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([-ratio, 0.0, -ratio]))  # 2 tokens x 1/2 each


def test_masked_tokens_may_hold_anything():
    s = PolicyLossSettings(kl_estimator="k3", kl_coef=0.1, correction="truncate", entropy_coef=0.1, ratio="sequence")
    logprob, old, advantage, mask, entropy, more = batch()
    clean = policy_loss(logprob, old, advantage, mask, settings=s, entropy=entropy, **more)
    more = {k: v if k == "cu_seqlens" else torch.where(mask, v, torch.nan) for k, v in more.items()}
    dirty_logprob, dirty_entropy = (
        torch.where(mask, t, torch.nan).detach().requires_grad_() for t in (logprob, entropy)
    )
    dirty = policy_loss(
        dirty_logprob, torch.where(mask, old, torch.inf), advantage, mask, settings=s, entropy=dirty_entropy, **more
    )
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean.sums, dirty.sums)
    dirty.loss.sum().backward()
    assert (dirty_logprob.grad[~mask] == 0).all()
    assert dirty_logprob.grad.isfinite().all()


@pytest.mark.parametrize("at", [0, 5000, 9999])
def test_the_largest_ratio_and_weight_are_of_all_tokens_wherever_they_stand(at):
    logprob, old, rollout = (torch.zeros(10000, dtype=torch.float64) for _ in range(3))
    logprob[at], rollout[at] = math.log(3.0), -math.log(1.25)
    settings = PolicyLossSettings(correction="truncate", correction_high=2.0)
    result = policy_loss(
        logprob, old, torch.ones_like(old), torch.ones(10000, dtype=torch.bool), settings=settings,
        rollout_logprobs=rollout,
    )  # fmt: skip
    sums = dict(zip(POLICY_LOSS_SUMS, result.sums.tolist(), strict=True))
    assert (sums["ratio_max"], sums["correction_weight_max"]) == (pytest.approx(3.0), pytest.approx(1.25))


def test_log_ratios_are_bounded_at_20():
    logprob = torch.tensor([19.5, 20.5, 30.0], dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    result = policy_loss(logprob, 0 * ones, -ones, ones.bool(), settings=PolicyLossSettings())
    torch.testing.assert_close(result.loss, torch.tensor([19.5, 20.0, 20.0], dtype=torch.float64).exp())


def test_a_ratio_that_would_overflow_stays_finite_and_passes_no_gradient():
    logprob = torch.tensor([0.0, -1000.0], requires_grad=True)
    old = torch.tensor([-1000.0, 0.0])
    s = PolicyLossSettings(clip_high=1e30, kl_estimator="k3", kl_coef=1.0)
    mask = torch.ones(2, dtype=torch.bool)
    out = policy_loss(logprob, old, torch.ones(2), mask, settings=s, ref_logprobs=old)
    out.loss.sum().backward()
    assert out.loss.isfinite().all()
    assert (logprob.grad == 0).all()


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_trained_tokens_give_zeros(tokens):
    zeros, mask = torch.zeros(tokens, requires_grad=True), torch.zeros(tokens, dtype=torch.bool)
    cu = torch.tensor([0, 0, tokens], dtype=torch.int32)
    for ratio in ("token", "sequence"):
        s = PolicyLossSettings(ratio=ratio)
        out = policy_loss(zeros, zeros, zeros, mask, settings=s, cu_seqlens=cu)
        out.loss.sum().backward()
        assert (out.loss == 0).all()
        assert (out.sums == 0).all()
        assert (zeros.grad == 0).all()
        assert policy_loss_metrics(out.sums)["loss"] == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 2, 7]))
def test_loss_and_metrics_do_not_depend_on_threads_and_merge_over_microbatches(tokens, cut, threads):
    generator = torch.Generator().manual_seed(tokens)
    logprob, old, advantage = (torch.randn(tokens, generator=generator) for _ in range(3))
    mask, cut = torch.rand(tokens, generator=generator) < 0.5, min(cut, tokens)
    s, before = PolicyLossSettings(), torch.get_num_threads()
    whole = policy_loss(logprob, old, advantage, mask, settings=s)
    try:
        torch.set_num_threads(threads)
        again = policy_loss(logprob, old, advantage, mask, settings=s)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole.loss, again.loss)
    assert torch.equal(whole.sums, again.sums)
    parts = [
        policy_loss(logprob[i], old[i], advantage[i], mask[i], settings=s) for i in (slice(0, cut), slice(cut, None))
    ]
    assert torch.equal(torch.cat([p.loss for p in parts]), whole.loss)
    first_max = [name.endswith("_max") for name in POLICY_LOSS_SUMS].index(True)
    sums = torch.stack([p.sums for p in parts])
    merged = torch.cat([sums[:, :first_max].sum(0), sums[:, first_max:].amax(0)])
    torch.testing.assert_close(merged, whole.sums, rtol=1e-12, atol=1e-9)


def test_the_names_of_the_sums_are_as_many_as_the_kernel_writes():
    assert len(POLICY_LOSS_SUMS) == _C.loss_sums


def test_segment_sums_skip_masked_values_and_fill_their_output_only():
    x, mask = torch.randn(40), torch.rand(40) < 0.5
    x[~mask] = torch.nan
    want = [
        [float(x[a:b][mask[a:b]].double().sum()), float(mask[a:b].sum())] for a, b in itertools.pairwise(CU.tolist())
    ]
    torch.testing.assert_close(segment_sum(x, mask, CU), torch.tensor(want, dtype=torch.float64))
    out = Guarded((4, 2), torch.float64)
    _C.segment_sum(where(x), 4, 0, x.data_ptr(), mask.data_ptr(), CU.data_ptr(), out.tensor.data_ptr())
    assert out.check().isfinite().all()
