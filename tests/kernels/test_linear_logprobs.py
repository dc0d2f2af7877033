"""Log-probs directly from hidden states: values, gradients, and the float32 main gradient."""

from __future__ import annotations

import pytest
import torch

from megarl.ops import torch_twins
from megarl.ops.linear_logprob import WideProduct
from megarl.ops.logprob import linear_logprobs, linear_token_loss


def problem(tokens=57, hidden=16, vocab=301, pad=11, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    w = torch.randn(vocab + pad, hidden, generator=generator).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.4] = -1
    return x.requires_grad_(), w.requires_grad_(), labels


def loss_of(logprobs, entropy, rows):
    return (logprobs * rows.cos()).sin() + 0.3 * entropy


def gradients(op, x, w, labels, **more):
    logprob, entropy = op(x, w, labels, vocab_valid=301, temperature=0.8, with_entropy=True, **more)
    rows = (labels != -1).nonzero().squeeze(1)
    return logprob, entropy, *torch.autograd.grad(loss_of(logprob[rows], entropy[rows], rows).sum(), (x, w))


@pytest.mark.parametrize("chunk_rows", [1, 7, 34, 1000, None])
def test_values_and_gradients_match_the_twin_for_every_chunk_size(chunk_rows):
    x, w, labels = problem()
    want = gradients(torch_twins.linear_logprobs, x, w, labels)
    for got, expected in zip(gradients(linear_logprobs, x, w, labels, chunk_rows=chunk_rows), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_gradcheck_passes_in_float64():
    x, w, labels = problem(tokens=9, hidden=4, vocab=13, pad=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w: linear_logprobs(x, w, labels, vocab_valid=13, with_entropy=True, chunk_rows=4), (x, w)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_token_loss_equals_log_probs_followed_by_the_loss(dtype):
    x, w, labels = problem(dtype=dtype)
    logprob, entropy, *want = gradients(linear_logprobs, x, w, labels)
    rows = (labels != -1).nonzero().squeeze(1)
    loss, got_logprob, got_entropy = linear_token_loss(
        x, w, labels, loss_of, vocab_valid=301, temperature=0.8, with_entropy=True, chunk_rows=8
    )
    torch.testing.assert_close(loss, loss_of(logprob[rows], entropy[rows], rows).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_logprob, logprob)
    torch.testing.assert_close(got_entropy, entropy)
    for got, expected in zip(torch.autograd.grad(loss * 3, (x, w)), want, strict=True):
        torch.testing.assert_close(got, expected * 3, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("op", ["logprobs", "token_loss"])
def test_the_weight_gradient_is_added_to_the_main_gradient_in_float32(op):
    x, w, labels = problem(tokens=900, dtype=torch.bfloat16)
    labels = labels.clamp(min=0)
    main = torch.ones(w.shape)

    def run(x, w, main_grad=None):
        if op == "logprobs":
            return linear_logprobs(x, w, labels, vocab_valid=301, chunk_rows=100, main_grad=main_grad)[0].sum()
        return linear_token_loss(
            x, w, labels, lambda logprob, *_: logprob, vocab_valid=301, chunk_rows=100, main_grad=main_grad
        )[0]

    run(x, w, main).backward()
    assert w.grad is None
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, w))
    want = torch.autograd.grad(run(wide_x, wide_w), wide_w)[0]
    error = (main - 1 - want).abs().max()
    assert error < 2e-2 * want.abs().max()  # logits and their gradients are bf16, sums are not
    summed_in_bf16 = torch.autograd.grad(run(x.detach().requires_grad_(), w), w)[0]
    assert summed_in_bf16.dtype == torch.bfloat16


def test_given_rows_give_the_same_result():
    x, w, labels = problem()
    rows = (labels != -1).nonzero().squeeze(1)
    plain, given = (linear_logprobs(x, w, labels, vocab_valid=301, rows=r)[0] for r in (None, rows))
    assert torch.equal(plain, given)


def test_no_tokens_and_no_labels_give_zeros():
    for tokens in (0, 5):
        x, w, _ = problem(tokens=tokens)
        labels = torch.full((tokens,), -1)
        logprob, entropy = linear_logprobs(x, w, labels, vocab_valid=301, with_entropy=True)
        (logprob.sum() + entropy.sum()).backward()
        assert (logprob == 0).all()
        assert (x.grad == 0).all()
        assert (w.grad == 0).all()


def test_a_frozen_weight_costs_no_gradient():
    x, w, labels = problem()
    logprob, _ = linear_logprobs(x, w.detach(), labels, vocab_valid=301)
    (got,) = torch.autograd.grad(logprob.sum(), x)
    want = torch.autograd.grad(linear_logprobs(x, w, labels, vocab_valid=301)[0].sum(), x)[0]
    torch.testing.assert_close(got, want)


def test_the_same_call_gives_the_same_bits():
    x, w, labels = problem(tokens=400)
    first, second = (gradients(linear_logprobs, x, w, labels, chunk_rows=64) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("chunk_rows", [7, 1000])
def test_logits_in_float32_lose_only_the_factors_rounding(chunk_rows):
    """Factors in bfloat16, as their weights are: logits rounded to bfloat16 are 1e-2 off, float32 ones 1e-5."""
    x, w, labels = problem(hidden=64, dtype=torch.bfloat16)
    exact, exact_entropy, *exact_gradients = gradients(
        torch_twins.linear_logprobs, *(t.detach().double().requires_grad_() for t in (x, w)), labels
    )
    wide = gradients(linear_logprobs, x, w, labels, chunk_rows=chunk_rows, logits_dtype=torch.float32)
    narrow = gradients(linear_logprobs, x, w, labels, chunk_rows=chunk_rows)
    torch.testing.assert_close(wide[0].double(), exact.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(wide[1].double(), exact_entropy.detach(), rtol=1e-5, atol=2e-5)
    assert (narrow[0].double() - exact).abs().max() > 5e-3
    for gradient, rounded, expected in zip(wide[2:], narrow[2:], exact_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - expected).norm() < 0.5 * (rounded.double() - expected).norm()


def test_a_token_loss_takes_float32_logits_too():
    x, w, labels = problem(dtype=torch.bfloat16)
    keys = {"vocab_valid": 301, "temperature": 0.8, "with_entropy": True, "logits_dtype": torch.float32}
    loss, logprob, _ = linear_token_loss(x, w, labels, loss_of, chunk_rows=9, **keys)
    expected, *_ = linear_logprobs(x, w, labels, chunk_rows=1000, **keys)
    torch.testing.assert_close(logprob, expected)
    loss.backward()
    assert x.grad.isfinite().all()
    assert w.grad.abs().sum() > 0


def of_token_loss(x, w, labels, **keys):
    """Gradients of a token loss in chunks of 9 rows, by a factor of 3."""
    keys = {"vocab_valid": 301, "with_entropy": True, "chunk_rows": 9} | keys
    return torch.autograd.grad(linear_token_loss(x, w, labels, loss_of, **keys)[0] * 3, (x, w))


def test_chunks_summed_in_bfloat16_round_a_little_more_than_in_float32():
    """Against float64: each of 6 chunks rounds the sum to bfloat16, a float32 sum is rounded once."""
    x, w, labels = problem(tokens=54, dtype=torch.bfloat16)
    labels = labels.clamp(min=0)
    wide = {"logits_dtype": torch.float32}
    exact = of_token_loss(*(t.detach().double().requires_grad_() for t in (x, w)), labels)[1]
    narrow, summed = (
        of_token_loss(x, w, labels, **wide, weight_grad_dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(narrow[0], summed[0])
    errors = [(g[1].double() - exact).norm() / exact.norm() for g in (narrow, summed)]
    assert 0 < errors[1] < errors[0] < 2.5 * errors[1] < 0.02
    unchanged = of_token_loss(x, w, labels, **wide)
    assert torch.equal(unchanged[1], summed[1]), "float32 is the default on the CPU"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_loss_gradient_known_beforehand_gives_the_same_gradients(dtype):
    x, w, labels = problem(dtype=dtype)
    want = of_token_loss(x, w, labels)
    got = of_token_loss(x, w, labels, loss_grad=3.0)
    tolerance = 2.0**-6 if dtype == torch.bfloat16 else 1e-5  # bfloat16 logits' gradients are scaled before rounding
    for gradient, expected in zip(got, want, strict=True):
        assert (gradient - expected).norm() <= tolerance * expected.norm()


def test_a_loss_gradient_known_beforehand_fills_the_main_gradient_in_forward():
    x, w, labels = problem()
    want = of_token_loss(x, w, labels)[1]
    main = torch.ones(w.shape)
    keys = {"vocab_valid": 301, "with_entropy": True, "chunk_rows": 9, "main_grad": main, "loss_grad": 3.0}
    with torch.no_grad():
        linear_token_loss(x, w, labels, loss_of, **keys)
    assert (main == 1).all(), "without gradients nothing is added"
    loss, *_ = linear_token_loss(x, w, labels, loss_of, **keys)
    torch.testing.assert_close(main - 1, want, rtol=1e-5, atol=2e-5)
    filled = main.clone()
    (loss * 3).backward()
    assert torch.equal(main, filled)
    assert w.grad is None
    torch.testing.assert_close(x.grad, of_token_loss(x, w, labels)[0], rtol=1e-5, atol=1e-5)


def test_another_loss_gradient_than_the_one_told_is_refused():
    x, w, labels = problem()
    loss, *_ = linear_token_loss(x, w, labels, loss_of, vocab_valid=301, with_entropy=True, loss_grad=2.0)
    with pytest.raises(ValueError, match=r"^backward got a loss gradient of 1 after loss_grad=2; pass the same$"):
        loss.backward()


def test_a_chunk_that_does_not_fit_the_memory_is_one_line(monkeypatch):
    x, w, labels = problem()

    def full(*shape, **keys):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(torch, "empty", full)
    line = r"^a chunk of 20 x 312 logits takes 0 MiB, more than cpu has free; pass fewer chunk_rows, or keep less .*$"
    with pytest.raises(torch.OutOfMemoryError, match=line):
        linear_logprobs(x, w, labels, vocab_valid=301, chunk_rows=20)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype, autocast):
    x, w, labels = problem(dtype=dtype)

    def everything():
        both = gradients(linear_logprobs, x, w, labels, chunk_rows=9)
        loss, *_ = linear_token_loss(x, w, labels, loss_of, vocab_valid=301, with_entropy=True, chunk_rows=9)
        wide = WideProduct.apply(x, w, torch.float64)
        return *both, *torch.autograd.grad(loss, (x, w)), wide, *torch.autograd.grad(wide.square().sum(), (x, w))

    plain = everything()
    with torch.autocast("cpu", dtype=autocast):
        cast = everything()
    for got, want in zip(cast, plain, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
