"""Random shapes, dtypes, bounds and masks through every CUDA kernel: equal to the CPU's, on a GPU and emulated."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from devices import Device, close
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES
from torch import Tensor

from megarl.ops.advantage import GROUP_MODES, gae_packed, group_advantage, moments, whiten
from megarl.ops.logprob import vocab_parallel_logprobs
from megarl.ops.loss import KL_ESTIMATORS, OBJECTIVES, RATIO_LEVELS, PolicyLossSettings, policy_loss, segment_sum
from tests.fuzzing import fuzzed

SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([255, 1023, 1025])), max_size=3)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@fuzzed(bounded=12, long=1_000)
def test_rows_of_any_shape(device: Device, effort: Any) -> None:
    @effort
    @given(
        rows=st.integers(1, 4), vocab=st.one_of(st.integers(1, 70), st.sampled_from([127, 129, 1023, 1025])),
        pad=st.integers(0, 9), dtype=st.sampled_from(DTYPES), inplace=st.booleans(), seed=SEEDS,
    )  # fmt: skip
    def holds(rows, vocab, pad, dtype, inplace, seed):
        torch.manual_seed(seed)
        logits, labels = torch.randn(rows, vocab + pad).to(dtype), torch.randint(-1, vocab, (rows,))
        temperature, g = torch.rand(rows, dtype=torch.float64) + 0.5, torch.randn(2, rows)

        def run(x: Tensor, y: Tensor, temperature: Tensor, g: Tensor) -> tuple[Tensor, ...]:
            x = x.clone().requires_grad_()
            keys = {"vocab_valid": vocab, "temperature": temperature, "with_entropy": True, "inplace_backward": inplace}
            values = vocab_parallel_logprobs(x, y, **keys)
            (grad,) = torch.autograd.grad((torch.stack(values) * g).sum(), x)
            return *(v.detach() for v in values), grad.detach()

        close(device, run, logits, labels, temperature, g, rtol=ROUNDING[dtype], atol=1e-5)

    holds()


@fuzzed(bounded=10, long=1_000)
def test_packed_sequences_of_any_lengths(device: Device, effort: Any) -> None:
    @effort
    @given(
        lengths=LENGTHS, masked=st.sampled_from([0.0, 0.3, 1.0]), mode=st.sampled_from(GROUP_MODES),
        columns=st.integers(1, 3), objective=st.sampled_from(OBJECTIVES), ratio=st.sampled_from(RATIO_LEVELS),
        kl=st.sampled_from(KL_ESTIMATORS), seed=SEEDS,
    )  # fmt: skip
    def holds(lengths, masked, mode, columns, objective, ratio, kl, seed):
        torch.manual_seed(seed)
        lengths = [*lengths, 1]  # without tokens some kernels are not launched
        cu, tokens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), sum(lengths)
        # Multiples of 1/64: no ratio lies so near a bound of the clip that rounding decides.
        x, old, advantage, ref = (torch.randint(-64, 64, (tokens,)) / 64 for _ in range(4))
        mask, settings = (
            torch.rand(tokens) >= masked,
            PolicyLossSettings(objective=objective, ratio=ratio, kl_estimator=kl, kl_coef=0.1, dual_clip=1.7),
        )

        def loss(x: Tensor, old: Tensor, advantage: Tensor, ref: Tensor, mask: Tensor, cu: Tensor) -> Tensor:
            more = {"ref_logprobs": ref, "cu_seqlens": cu}
            return policy_loss(x, old, advantage, mask, settings=settings, **more).loss

        close(device, gae_packed, x, old, mask, cu, gamma=0.99, lam=torch.rand(len(lengths)), atol=1e-4)
        close(device, segment_sum, x, mask, cu)
        close(device, loss, x, old, advantage, ref, mask, cu, rtol=1e-4, atol=1e-5)
        close(device, moments, x, mask, rtol=1e-10, atol=1e-12)
        close(device, whiten, x, mask, atol=1e-5)
        scores, groups = torch.randn(len(lengths), columns), torch.randint(0, 3, (len(lengths),))
        close(device, group_advantage, scores, groups, mode=mode, rtol=1e-4, atol=1e-5)

    holds()
