"""Every kernel on a CUDA device, with the CPU tests' shapes and extreme values, against the oracle and the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import DTYPES, VOCABS, Guarded, logprob_grad_oracle, logprob_oracle

from megarl.ops import logprob_kernels as kernels
from megarl.ops.advantage import GROUP_MODES, gae_packed, group_advantage, moments, whiten
from megarl.ops.logprob import linear_logprobs, linear_token_loss, vocab_parallel_logprobs
from megarl.ops.loss import PolicyLossSettings, policy_loss, segment_sum
from megarl.ops.native import _C, DTYPE_CODES, where
from megarl.types import cu_seqlens_of

ROUNDING = {torch.float32: 1.2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def on_both(run, *tensors, **keys):
    """Calls `run` on CPU and on the device, and returns both results on the CPU."""
    device_tensors = [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]
    device_keys = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in keys.items()}
    on_cpu, on_device = run(*tensors, **keys), run(*device_tensors, **device_keys)
    cpu_results = on_cpu if isinstance(on_cpu, tuple) else (on_cpu,)
    device_results = on_device if isinstance(on_device, tuple) else (on_device,)
    return cpu_results, tuple(t.cpu() for t in device_results)


def close(run, *tensors, rtol=1e-5, atol=1e-6, **keys):
    for on_cpu, on_device in zip(*on_both(run, *tensors, **keys), strict=True):
        torch.testing.assert_close(on_device, on_cpu, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("pad", [0, 5])
def test_log_probs_and_gradients_match_the_oracle(vocab, dtype, pad):
    rows = 4
    logits = (torch.randn(rows, vocab + pad) * 2).to(dtype)
    labels = torch.randint(0, vocab, (rows,))
    labels[0] = -1
    g, h, temperature = torch.randn(rows), torch.randn(rows), torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
    leaf = logits.cuda().requires_grad_()
    logprob, entropy = vocab_parallel_logprobs(
        leaf, labels.cuda(), vocab_valid=vocab, temperature=temperature.cuda(), with_entropy=True
    )
    (logprob * g.cuda() + entropy * h.cuda()).sum().backward()
    want, want_entropy, _ = logprob_oracle(logits, labels, vocab, temperature.numpy())
    np.testing.assert_allclose(logprob.detach().cpu(), want, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(entropy.detach().cpu(), want_entropy, rtol=1e-6, atol=3e-6)
    want_grad = logprob_grad_oracle(logits, labels, vocab, g, h, temperature.numpy())
    error = np.abs(leaf.grad.double().cpu().numpy() - want_grad)
    assert (error <= ROUNDING[dtype] * 1.02 * np.abs(want_grad) + 2e-6 * np.abs(want_grad).max() + 6e-8).all()
    alone, _ = vocab_parallel_logprobs(leaf, labels.cuda(), vocab_valid=vocab, temperature=temperature.cuda())
    torch.testing.assert_close(alone, logprob, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_behave_like_on_the_cpu(dtype):
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

    close(run, logits, labels, rtol=2.1 * ROUNDING[dtype] + 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [33, 50257])
def test_a_row_gives_the_same_bits_at_every_position_and_alignment(dtype, vocab):
    logits = torch.randn(24, vocab, device="cuda").to(dtype)
    labels, g = torch.randint(0, vocab, (24,), device="cuda"), torch.randn(24, device="cuda")
    order = torch.randperm(24, device="cuda")
    spread = torch.empty(24 * (vocab + 13) + 1, dtype=dtype, device="cuda")[1:].view(24, vocab + 13)[:, :vocab]
    spread.copy_(logits[order])

    def run(x, y, g):
        x = x.detach().requires_grad_()
        logprob, entropy = vocab_parallel_logprobs(x, y, vocab_valid=vocab, with_entropy=True)
        ((logprob + entropy) * g).sum().backward()
        return logprob.detach(), entropy.detach(), x.grad

    for got, want in zip(run(spread, labels[order], g[order]), run(logits, labels, g), strict=True):
        assert torch.equal(got, want[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_kernels_fill_their_outputs_and_write_nothing_else(dtype):
    rows, vocab, stride = 6, 4097, 4110
    source = Guarded((rows, stride), dtype, "cuda")
    source.tensor.copy_(torch.randn(rows, stride))
    labels, one = torch.tensor([0, -1, 5, 4095, 0, 1], device="cuda"), torch.ones(1, dtype=torch.float64, device="cuda")
    shape, here = _C.LogitRows(rows, vocab, vocab - 1, stride, 0, DTYPE_CODES[dtype]), where(source.tensor)
    stats, logprob, entropy, context, grad = (
        Guarded(s, d, "cuda")
        for s, d in [
            ((1, rows, 4), torch.float32),
            ((rows,), torch.float32),
            ((rows,), torch.float32),
            ((rows, 3), torch.float32),
            ((rows, vocab + 2), dtype),
        ]
    )
    at = [t.data_ptr() for t in (source.tensor, labels, one)]
    _C.logprob_stats(here, shape, *at, 0, True, stats.tensor.data_ptr())
    outputs = [b.tensor.data_ptr() for b in (logprob, entropy, context)]
    _C.logprob_merge(here, 1, rows, 0, stats.tensor.data_ptr(), *at[1:], 0, *outputs)
    g = torch.ones(rows, device="cuda")
    _C.logprob_backward(
        *(here, shape, at[0], grad.tensor.data_ptr(), vocab + 2, *at[1:], 0),
        *(context.tensor.data_ptr(), g.data_ptr(), g.data_ptr()),
    )
    source.check()
    for buffer in (stats, logprob, entropy, context):
        assert buffer.check().isfinite().all()
    written = grad.check()
    assert written[:, :vocab].isfinite().all()
    assert written[:, vocab:].isnan().all()


def test_offsets_beyond_2_to_the_31_elements_are_reached():
    rows, vocab = 14400, 151936  # 2.19e9 logits, 4.4 GB
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-1] = torch.randn(vocab, device="cuda")
    labels = torch.full((rows,), 7, device="cuda")
    one = torch.ones(1, dtype=torch.float64, device="cuda")
    stats = kernels.logprob_stats(logits, labels, one, vocab, 0, True)
    logprob, _, context = kernels.logprob_merge(stats[None], labels, one)
    torch.testing.assert_close(logprob[-1], logits[-1].float().log_softmax(-1)[7])
    g = torch.zeros(rows, device="cuda")
    g[-1] = 1
    want = -logits[-1].float().softmax(-1)
    want[7] += 1
    kernels.logprob_backward_(logits, labels, one, context, g, None, vocab, 0)
    torch.testing.assert_close(logits[-1].float(), want, rtol=5e-3, atol=1e-7)
    assert not logits[:-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_in_chunks_matches_the_cpu_and_fills_a_main_gradient(dtype):
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
    close(run, x, w, labels, rtol=wide, atol=wide)


@pytest.mark.parametrize("mode", GROUP_MODES)
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_group_advantages_match_the_cpu(mode, aggregation):
    close(group_advantage, torch.randn(200, 3), torch.randint(0, 40, (200,)), mode=mode, aggregation=aggregation)


@pytest.mark.parametrize("masked", [0.0, 0.4])
def test_gae_moments_and_whitening_match_the_cpu(masked):
    cu = cu_seqlens_of(torch.tensor([1, 0, 1023, 1024, 1025, 5000, 3]))
    tokens = int(cu[-1])
    rewards, values, mask = torch.randn(tokens), torch.randn(tokens), torch.rand(tokens) >= masked
    close(gae_packed, rewards, values, mask, cu, gamma=0.99, lam=torch.rand(7), bootstrap=torch.randn(7), atol=1e-5)
    close(moments, rewards, mask, rtol=1e-10, atol=1e-12)
    close(whiten, rewards, mask, clip=1.5)
    close(segment_sum, rewards, mask, cu, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("objective", ["clip", "cispo"])
@pytest.mark.parametrize(("kl", "correction"), [("none", "none"), ("k2", "mask"), ("k3", "truncate")])
def test_the_policy_loss_matches_the_cpu(ratio, objective, kl, correction):
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

    close(run, *tensors, mask, cu, rtol=2e-5, atol=2e-5)
