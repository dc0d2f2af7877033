"""Every CUDA kernel with the CPU tests' shapes and extreme values, against the oracle and the CPU kernels.

Each case runs on a GPU where there is one, and everywhere on the emulator of tests/simt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from devices import CudaDevice, EmulatedDevice, close
from oracle import DTYPES, VOCABS, Guarded, logprob_grad_oracle, logprob_oracle

from megarl.ops import logprob_kernels as kernels
from megarl.ops import native
from megarl.ops.advantage import GROUP_MODES, gae_packed, group_advantage, moments, whiten
from megarl.ops.logprob import linear_logprobs, linear_token_loss, vocab_parallel_logprobs
from megarl.ops.loss import PolicyLossSettings, policy_loss, segment_sum
from megarl.ops.native import DTYPE_CODES
from megarl.types import cu_seqlens_of

ROUNDING = {torch.float32: 1.2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [*VOCABS, 123, 507, 50260])
@pytest.mark.parametrize(("rows", "pad"), [(4, 0), (3, 5), (1, 8)])
def test_log_probs_and_gradients_match_the_oracle(device, vocab, dtype, rows, pad):
    logits = (torch.randn(rows, vocab + pad) * 2).to(dtype)
    labels = torch.randint(0, vocab, (rows,))
    labels[0] = -1 if rows > 1 else 0
    g, h, temperature = torch.randn(rows), torch.randn(rows), torch.linspace(0.5, 1.5, rows, dtype=torch.float64)

    def run(logits, labels, g, h, temperature):
        leaf, keys = logits.requires_grad_(), {"vocab_valid": vocab, "temperature": temperature}
        logprob, entropy = vocab_parallel_logprobs(leaf, labels, with_entropy=True, **keys)
        (logprob * g + entropy * h).sum().backward()
        alone, _ = vocab_parallel_logprobs(leaf, labels, **keys)
        return logprob.detach(), entropy.detach(), leaf.grad, alone.detach()

    logprob, entropy, grad, alone = device.run(run, logits, labels, g, h, temperature)
    want, want_entropy, _ = logprob_oracle(logits, labels, vocab, temperature.numpy())
    np.testing.assert_allclose(logprob, want, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(entropy, want_entropy, rtol=1e-6, atol=3e-6)
    want_grad = logprob_grad_oracle(logits, labels, vocab, g, h, temperature.numpy())
    error = np.abs(grad.double().numpy() - want_grad)
    assert (error <= ROUNDING[dtype] * 1.02 * np.abs(want_grad) + 2e-6 * np.abs(want_grad).max() + 6e-8).all()
    torch.testing.assert_close(alone, logprob, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "pad"), [(65535, 0), (65533, 3)])
def test_long_rows_take_larger_blocks_and_match_the_oracle(device, vocab, pad, dtype):
    """Vocabularies around the size from which a row takes a larger block."""
    test_log_probs_and_gradients_match_the_oracle(device, vocab, dtype, 2, pad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [507, 66000])
def test_results_in_one_launch_are_those_of_statistics_and_merge(device, vocab, dtype):
    logits, labels = torch.randn(6, vocab).to(dtype), torch.tensor([0, -1, 5, vocab - 1, 3, 1])
    logits[4] = torch.nan
    logits[5, 7:] = -torch.inf

    def run(logits, labels, inv_temp):
        keys = (logits, labels, inv_temp, vocab - 2, 0, True)
        stats = kernels.logprob_stats(*keys)
        return *kernels.logprob_rows(*keys), *kernels.logprob_merge(stats[None], labels, inv_temp)

    results = device.run(run, logits, labels, torch.linspace(0.5, 2, 6, dtype=torch.float64))
    assert results[0][1] == 0
    assert results[0][3].isnan(), "a label outside of the vocabulary"
    for got, want in zip(results[:3], results[3:], strict=True):
        assert torch.equal(got.nan_to_num(77.0), want.nan_to_num(77.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_behave_like_on_the_cpu(device, dtype):
    logits = (torch.randn(9, 4097) * 3).to(dtype)
    logits[1] = torch.nan
    logits[2, 77] = torch.nan
    logits[3, ::2] = -torch.inf
    logits[4] = -torch.inf
    logits[5] = logits[5] + 1e4
    logits[6, 5] = torch.inf
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, -1, 4096])

    def run(x, y):
        x = x.clone().requires_grad_()
        logprob, entropy = vocab_parallel_logprobs(x, y, vocab_valid=4097, with_entropy=True)
        (logprob.nan_to_num() + entropy).sum().backward()
        return logprob.detach(), entropy.detach(), x.grad

    close(device, run, logits, labels, rtol=2.1 * ROUNDING[dtype] + 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [33, 50257])
def test_a_row_gives_the_same_bits_at_every_position_and_alignment(device, dtype, vocab):
    logits = torch.randn(24, vocab).to(dtype)
    labels, g, order = torch.randint(0, vocab, (24,)), torch.randn(24), torch.randperm(24)

    def at(x, y, g):
        x = x.detach().requires_grad_()
        logprob, entropy = vocab_parallel_logprobs(x, y, vocab_valid=vocab, with_entropy=True)
        ((logprob + entropy) * g).sum().backward()
        return logprob.detach(), entropy.detach(), x.grad

    def run(logits, labels, g, order):
        spread = torch.empty(24 * (vocab + 13) + 1, dtype=dtype, device=logits.device)[1:]
        spread = spread.view(24, vocab + 13)[:, :vocab].copy_(logits[order])
        return *at(spread, labels[order], g[order]), *(t[order] for t in at(logits, labels, g))

    results = device.run(run, logits, labels, g, order)
    for got, want in zip(results[:3], results[3:], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_kernels_fill_their_outputs_and_write_nothing_else(device, dtype):
    rows, vocab, stride = 6, 4097, 4110
    logits, labels = torch.randn(rows, stride).to(dtype), torch.tensor([0, -1, 5, 4095, 0, 1])

    def run(logits, labels, one, g):
        shape, here = native._C.LogitRows(rows, vocab, vocab - 1, stride, 0, DTYPE_CODES[dtype]), native.where(logits)
        stats, logprob, entropy, context, grad = (
            Guarded(s, d, logits.device)
            for s, d in [
                ((1, rows, 4), torch.float32),
                ((rows,), torch.float32),
                ((rows,), torch.float32),
                ((rows, 3), torch.float32),
                ((rows, vocab + 2), dtype),
            ]
        )
        at = [t.data_ptr() for t in (logits, labels, one)]
        native._C.logprob_stats(here, shape, *at, 0, True, stats.tensor.data_ptr())
        outputs = [b.tensor.data_ptr() for b in (logprob, entropy, context)]
        native._C.logprob_merge(here, 1, rows, 0, stats.tensor.data_ptr(), *at[1:], 0, *outputs)
        native._C.logprob_backward(
            *(here, shape, at[0], grad.tensor.data_ptr(), vocab + 2, *at[1:], 0),
            *(context.tensor.data_ptr(), g.data_ptr(), g.data_ptr()),
        )
        return tuple(buffer.check() for buffer in (stats, logprob, entropy, context, grad))

    *filled, grad = device.run(run, logits, labels, torch.ones(1, dtype=torch.float64), torch.ones(rows))
    for tensor in filled:
        assert tensor.isfinite().all()
    assert grad[:, :vocab].isfinite().all()
    assert grad[:, vocab:].isnan().all()


def check_the_last_row(logits, labels):
    logits[-1] = torch.linspace(-3, 3, logits.shape[1])
    before, vocab = logits[-1].float(), logits.shape[1]
    one = torch.ones(1, dtype=torch.float64, device=labels.device)
    stats = kernels.logprob_stats(logits, labels, one, vocab, 0, True)
    logprob, _, context = kernels.logprob_merge(stats[None], labels, one)
    torch.testing.assert_close(logprob[-1], before.log_softmax(-1)[7], rtol=1e-6, atol=1e-6)
    g = torch.zeros(len(labels), device=labels.device)
    g[-1] = 1
    want = -before.softmax(-1)
    want[7] += 1
    kernels.logprob_backward_(logits, labels, one, context, g, None, vocab, 0)
    torch.testing.assert_close(logits[-1].float(), want, rtol=5e-3, atol=1e-7)
    return logits[-1].clone()


def test_offsets_beyond_2_to_the_31_elements_are_reached(cuda: CudaDevice):
    logits = torch.zeros(14400, 151936, dtype=torch.bfloat16, device="cuda")  # 2.19e9 logits, 4.4 GB
    check_the_last_row(logits, torch.full((14400,), 7, device="cuda"))
    assert not logits[:-1].any()


def test_rows_2_to_the_31_elements_apart_are_reached_by_the_emulator(emulated: EmulatedDevice, tmp_path: Path):
    """Maps a sparse file, which has memory for the touched columns only."""
    rows, vocab, stride = 3, 1000, 2**30 + 8
    elements = (rows - 1) * stride + vocab
    space = torch.from_file(str(tmp_path / "logits"), shared=True, size=elements, dtype=torch.bfloat16)
    logits = space.as_strided((rows, vocab), (stride, 1))
    emulated.run(lambda labels: check_the_last_row(logits, labels), torch.full((rows,), 7))
    assert not logits[:-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_in_chunks_matches_the_cpu_and_fills_a_main_gradient(device, dtype):
    x, w, labels = torch.randn(300, 64).to(dtype), torch.randn(999, 64).to(dtype), torch.randint(-1, 990, (300,))

    def run(x, w, y):
        x, w, main = x.requires_grad_(), w.requires_grad_(), torch.zeros(999, 64, device=x.device)
        logprob, entropy = linear_logprobs(x, w, y, vocab_valid=990, with_entropy=True, chunk_rows=64, main_grad=main)
        (first,) = torch.autograd.grad((logprob + entropy).sum(), (x,), retain_graph=True)
        (logprob.cos() + entropy).sum().backward()
        keys = {"vocab_valid": 990, "with_entropy": True, "chunk_rows": 64}
        loss, *_ = linear_token_loss(x, w, y, lambda a, b, _: a.cos() + b, **keys)
        return logprob.detach(), entropy.detach(), first, main, loss.detach()

    wide = 0.1 if dtype == torch.bfloat16 else 1e-3
    close(device, run, x, w, labels, rtol=wide, atol=wide)


@pytest.mark.parametrize("mode", GROUP_MODES)
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_group_advantages_match_the_cpu(device, mode, aggregation):
    close(
        device, group_advantage, torch.randn(200, 3), torch.randint(0, 40, (200,)), mode=mode, aggregation=aggregation
    )


@pytest.mark.parametrize("masked", [0.0, 0.4])
def test_gae_moments_and_whitening_match_the_cpu(device, masked):
    cu = cu_seqlens_of(torch.tensor([1, 0, 1023, 1024, 1025, 5000, 3]))
    tokens = int(cu[-1])
    rewards, values, mask = torch.randn(tokens), torch.randn(tokens), torch.rand(tokens) >= masked
    close(
        device,
        gae_packed,
        rewards,
        values,
        mask,
        cu,
        gamma=0.99,
        lam=torch.rand(7),
        bootstrap=torch.randn(7),
        atol=1e-5,
    )
    close(device, moments, rewards, mask, rtol=1e-10, atol=1e-12)
    close(device, whiten, rewards, mask, clip=1.5)
    close(device, segment_sum, rewards, mask, cu, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("objective", ["clip", "cispo"])
@pytest.mark.parametrize(("kl", "correction"), [("none", "none"), ("k2", "mask"), ("k3", "truncate")])
def test_the_policy_loss_matches_the_cpu(device, ratio, objective, kl, correction):
    cu = cu_seqlens_of(torch.tensor([1000, 0, 1, 3000]))
    s = PolicyLossSettings(
        objective=objective, ratio=ratio, dual_clip=3.0, kl_estimator=kl, kl_coef=0.1, correction=correction,
        correction_low=0.5, entropy_coef=0.01,
    )  # fmt: skip
    tensors = [torch.randn(4001) * 0.5 for _ in range(6)]
    mask = torch.rand(4001) < 0.7

    def run(logprob, old, advantage, ref, rollout, entropy, mask, cu):
        logprob = logprob.clone().requires_grad_()
        more = {"ref_logprobs": ref, "rollout_logprobs": rollout, "entropy": entropy, "cu_seqlens": cu}
        out = policy_loss(logprob, old, advantage, mask, settings=s, **more)
        out.loss.sum().backward()
        return out.loss.detach(), out.sums, logprob.grad

    close(device, run, *tensors, mask, cu, rtol=2e-5, atol=2e-5)
