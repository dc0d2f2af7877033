"""Columns left out of the head's products: the bound on the error, and distributions that have or lack such columns."""

from __future__ import annotations

import pytest
import torch

from megarl.ops.linear_logprob import linear_logprobs, linear_token_loss
from megarl.ops.skipped_columns import kept_columns

VOCAB, HIDDEN, ROWS = 400, 12, 40


def problem(slope, peak=0.0, dtype=torch.float64):
    """Hidden states and a head whose logits fall by `slope` with log(id); labels are `peak` above the rest."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype) * 0.5
    w = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype) * 0.5
    x[:, 0], w[:, 0] = 1.0, -slope * torch.arange(1, VOCAB + 1).log()
    labels = torch.arange(ROWS) % 10
    w[labels, 0] += peak
    return x.requires_grad_(), w.requires_grad_(), labels


def loss_of(factors):
    return lambda logprobs, entropy, rows: factors[rows] * (logprobs + 0.1 * entropy)


def gradients(x, w, labels, factors, skipped, chunk_rows=17, by_chunk=True):
    keys = {"vocab_valid": VOCAB, "with_entropy": True, "chunk_rows": chunk_rows, "skipped": skipped}
    if by_chunk:
        loss, *_ = linear_token_loss(x, w, labels, loss_of(factors), **keys)
    else:
        logprobs, entropy = linear_logprobs(x, w, labels, **keys)
        loss = loss_of(factors)(logprobs, entropy, torch.arange(ROWS)).sum()
    return torch.autograd.grad(loss, (x, w))


def of_logits(x, w, labels, factors):
    """The oracle: the gradient of the logits, by autograd in float64."""
    logits = (x.double() @ w.double().t()).detach().requires_grad_()
    logp = logits.log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    loss = (factors * (logp[torch.arange(ROWS), labels] + 0.1 * entropy)).sum()
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("by_chunk", [True, False], ids=["token loss", "log-probs"])
@pytest.mark.parametrize(("slope", "peak"), [(4.0, 0.0), (4.0, 12.0), (6.0, 3.0)])
@pytest.mark.parametrize("share", [2**-12, 2**-7, 0.02, 0.2])
def test_the_error_is_within_the_bound(slope, peak, share, by_chunk):
    x, w, labels = problem(slope, peak)
    factors = torch.linspace(-2, 3, ROWS, dtype=torch.float64)
    d, exact = of_logits(x, w, labels, factors), gradients(x, w, labels, factors, 0.0, by_chunk=by_chunk)
    torch.testing.assert_close(list(exact), [d @ w, d.t() @ x], rtol=1e-9, atol=1e-12)
    got = gradients(x, w, labels, factors, share, by_chunk=by_chunk)
    tiny = 1e-12
    of_rows = torch.linalg.vector_norm(got[0] - exact[0], dim=1)
    assert (of_rows <= share * torch.linalg.vector_norm(d, dim=1) * torch.linalg.matrix_norm(w, 2) + tiny).all()
    of_weight = torch.linalg.matrix_norm(got[1] - exact[1])
    assert of_weight <= share * torch.linalg.matrix_norm(d) * torch.linalg.matrix_norm(x, 2) + tiny
    if share >= 0.02:
        assert (got[1] == 0).all(1).float().mean() >= 0.5, "nothing was left out"


def test_flat_distributions_leave_nothing_out():
    x, w, labels = problem(0.0, dtype=torch.float32)
    factors = torch.ones(ROWS)
    for exact, got in zip(*(gradients(x, w, labels, factors, share) for share in (0.0, 0.02)), strict=True):
        assert torch.equal(exact, got)


def test_a_row_with_a_small_gradient_keeps_its_columns():
    """By its size alone all of the row would vanish beside the others."""
    x, w, labels = problem(6.0, dtype=torch.float32)
    labels[5] = 390  # no other row has a gradient here
    factors = torch.ones(ROWS)
    factors[5] = 1e-14
    d = of_logits(x, w, labels, factors.double())
    columns = kept_columns(d.float(), 0.02, None)
    assert columns is not None
    assert 390 in columns.tolist()
    exact, got = (gradients(x, w, labels, factors, share, ROWS)[0][5].double() for share in (0.0, 0.02))
    assert torch.linalg.vector_norm(exact) > 1e-14
    of_d = torch.linalg.vector_norm(d[5].double()) * torch.linalg.matrix_norm(w.double(), 2)
    assert 0 < torch.linalg.vector_norm(got - exact) <= 0.02 * of_d


def test_a_row_whose_squares_vanish_keeps_every_column():
    d = torch.full((2, 100), 1e-28)
    d[0] = 0
    d[0, 3] = 1.0
    assert kept_columns(d, 0.02, None) is None
    assert kept_columns(d.double(), 0.2, None) is None, "all of its columns are alike"


def test_rows_without_a_gradient_ask_for_no_column_and_nan_keeps_its_own():
    d = torch.zeros(3, 100)
    d[0, 7], d[2, 3], d[2, 50] = 1.0, -1.0, 1e-9
    assert kept_columns(d, 0.01, None).tolist() == [3, 7]
    assert kept_columns(torch.zeros(3, 100), 0.01, None).tolist() == []
    d[1, 20] = float("nan")
    assert kept_columns(d, 0.01, None) is None, "no column can be judged in a row of NaN"


def test_few_columns_to_leave_out_are_computed_all_the_same():
    d = torch.eye(60, 100)
    assert kept_columns(d, 0.01, None) is None
    assert kept_columns(d[:50], 0.01, None).tolist() == list(range(50))


@pytest.mark.parametrize("main", [False, True])
def test_sixteen_bits_and_the_main_gradient_agree(main):
    x, w, labels = (t.detach() for t in problem(6.0, 3.0, torch.bfloat16))
    x.requires_grad_(), w.requires_grad_(not main)
    found = []
    for share in (0.0, 0.02):
        grad = torch.full((VOCAB, HIDDEN), 0.5) if main else None
        keys = {"vocab_valid": VOCAB, "with_entropy": True, "chunk_rows": 17, "skipped": share, "main_grad": grad}
        loss, *_ = linear_token_loss(x, w, labels, loss_of(torch.ones(ROWS)), loss_grad=1.0, **keys)
        x.grad = w.grad = None
        loss.backward()
        found.append((x.grad.float(), grad - 0.5 if main else w.grad.float()))
    for exact, got in zip(*found, strict=True):
        torch.testing.assert_close(got, exact, rtol=0.02, atol=float(exact.abs().max()) * 0.02)
    assert (found[1][1] == 0).all(1).float().mean() >= 0.5


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_outside_its_range_is_refused(share):
    x, w, labels = problem(1.0)
    with pytest.raises(ValueError, match="it must be at least 0 and below 1"):
        linear_logprobs(x, w, labels, vocab_valid=VOCAB, skipped=share)
