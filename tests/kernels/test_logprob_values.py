"""Log-prob, entropy and their gradients against a float64 oracle, over dtypes, shapes and extreme values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import DTYPES, VOCABS, logprob_grad_oracle, logprob_oracle

from megarl.ops import torch_twins
from megarl.ops.logprob import gather_logprobs, gather_logprobs_entropy, vocab_parallel_logprobs

ROUNDING = {torch.float32: 6e-8, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1.2e-16}


def case(vocab, dtype, rows=5, scale=2.0, pad=0):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab + pad, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[0] = -1
    return logits, labels, torch.randn(rows, generator=generator), torch.randn(rows, generator=generator)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("vocab", VOCABS)
def test_values_and_gradients_match_the_oracle(vocab, dtype):
    rows = 3 if vocab > 40000 else 5
    logits, labels, g, h = case(vocab, dtype, rows)
    temperature = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    logprob, entropy = vocab_parallel_logprobs(
        leaf, labels, vocab_valid=vocab, temperature=temperature, with_entropy=True
    )
    want_logprob, want_entropy, _ = logprob_oracle(logits, labels, vocab, temperature.numpy())
    wide = logprob.dtype == torch.float64
    np.testing.assert_allclose(
        logprob.detach(), want_logprob, rtol=1e-12 if wide else 3e-7, atol=1e-12 if wide else 1e-6
    )
    np.testing.assert_allclose(
        entropy.detach(), want_entropy, rtol=1e-12 if wide else 3e-7, atol=1e-12 if wide else 1e-6
    )
    (logprob * g + entropy * h).sum().backward()
    want = logprob_grad_oracle(logits, labels, vocab, g, h, temperature.numpy())
    error = np.abs(leaf.grad.double().numpy() - want)
    # Tolerance: rounding to the output's dtype, and float32 arithmetic of log p.
    assert (
        error <= ROUNDING[dtype] * 1.02 * np.abs(want) + (1e-14 if wide else 6e-7) * np.abs(want).max() + 6e-8
    ).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_error_is_at_most_twice_that_of_torch(dtype, scale):
    logits, labels, _, _ = case(4097, dtype, rows=64, scale=scale)
    want, want_entropy, _ = logprob_oracle(logits, labels, 4097)
    ours, entropy = vocab_parallel_logprobs(logits, labels, vocab_valid=4097, with_entropy=True)
    torch_logprobs = logits.log_softmax(-1)
    torch_entropy = -(torch_logprobs.float().exp() * torch_logprobs.float()).sum(-1)
    torch_logprob = torch_logprobs.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1).double().numpy()
    floor = 1e-6  # one rounding of a float32 near 10
    labelled = labels.numpy() >= 0
    assert np.abs(ours.numpy() - want).max() <= 2 * np.abs(torch_logprob - want)[labelled].max() + floor
    assert (
        np.abs(entropy.numpy() - want_entropy).max()
        <= 2 * np.abs(torch_entropy.numpy() - want_entropy)[labelled].max() + floor
    )


def test_gradcheck_passes_in_float64():
    logits = torch.randn(6, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([3, -1, 0, 16, 5, 5])
    temperature = torch.linspace(0.5, 2, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_logprobs(x, labels, vocab_valid=17, temperature=temperature, with_entropy=True),
        (logits,),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_agrees(dtype):
    logits, labels, g, h = case(1000, dtype, pad=24)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    for leaf, op in zip(leaves, (vocab_parallel_logprobs, torch_twins.vocab_parallel_logprobs), strict=True):
        logprob, entropy = op(leaf, labels, vocab_valid=1000, temperature=0.7, with_entropy=True)
        (logprob * g + entropy * h).sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=2.1 * ROUNDING[dtype] + 1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_backward_gives_the_same_bits_and_no_second_buffer(dtype):
    logits, labels, g, h = case(4097, dtype, pad=3)
    grads = []
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        hidden = leaf * 1  # the overwritten tensor must not be a leaf
        logprob, entropy = vocab_parallel_logprobs(
            hidden, labels, vocab_valid=4097, with_entropy=True, inplace_backward=inplace
        )
        (grad,) = torch.autograd.grad((logprob * g + entropy * h).sum(), hidden, retain_graph=True)
        assert (grad.data_ptr() == hidden.data_ptr()) == inplace
        grads.append(grad.clone())
        if inplace:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad((logprob * g).sum(), hidden)
    assert torch.equal(*grads)


def test_padding_columns_and_unlabelled_rows_get_zero_gradient_even_where_they_hold_nan():
    logits, labels, g, h = case(33, torch.float32, pad=7)
    logits[:, 33:] = torch.nan
    logits[0] = torch.nan  # its label is -1
    logits.requires_grad_()
    logprob, entropy = vocab_parallel_logprobs(logits, labels, vocab_valid=33, with_entropy=True)
    (logprob * g + entropy * h).sum().backward()
    assert logprob.isfinite().all()
    assert entropy.isfinite().all()
    assert logits.grad.isfinite().all()
    assert logprob[0] == 0
    assert entropy[0] == 0
    assert (logits.grad[:, 33:] == 0).all()
    assert (logits.grad[0] == 0).all()
    assert (logits.grad[1:, :33] != 0).any()


def test_the_row_stride_may_exceed_the_row_length():
    storage = torch.randn(6, 50, dtype=torch.float32)
    labels = torch.tensor([0, 5, 30, -1, 2, 39])
    dense, strided = storage[:, :40].clone().requires_grad_(), storage.clone().requires_grad_()
    vocab_parallel_logprobs(dense, labels, vocab_valid=40)[0].sum().backward()
    vocab_parallel_logprobs(strided[:, :40], labels, vocab_valid=40)[0].sum().backward()
    assert torch.equal(dense.grad, strided.grad[:, :40])
    assert (strided.grad[:, 40:] == 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_minus_infinity_columns_have_probability_and_gradient_zero(dtype):
    logits, labels, g, h = case(1000, dtype)
    masked = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    masked[torch.arange(5), labels.clamp(min=0)] = False
    logits[masked] = -torch.inf
    leaf = logits.clone().requires_grad_()
    logprob, entropy = vocab_parallel_logprobs(leaf, labels, vocab_valid=1000, with_entropy=True)
    (logprob * g + entropy * h).sum().backward()
    want, want_entropy, _ = logprob_oracle(logits, labels, 1000)
    np.testing.assert_allclose(logprob.detach(), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(entropy.detach(), want_entropy, rtol=1e-6, atol=1e-6)
    assert (leaf.grad[masked] == 0).all()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kept", [slice(0, 8), slice(500, 508), slice(3990, 3998)])
def test_columns_at_the_smallest_finite_logit_leave_the_entropy_to_the_others(dtype, kept):
    """A mask of `torch.finfo.min` is common; its distance to the maximum, times a count, is infinite."""
    logits, labels, g, h = case(4000, dtype)
    masked = torch.ones(4000, dtype=torch.bool)
    masked[kept] = False
    labels[labels >= 0] = kept.start + 3
    logits[:, masked] = torch.finfo(dtype).min
    leaf = logits.clone().requires_grad_()
    logprob, entropy = vocab_parallel_logprobs(leaf, labels, vocab_valid=4000, temperature=0.5, with_entropy=True)
    (logprob * g + entropy * h).sum().backward()
    want, want_entropy, _ = logprob_oracle(logits, labels, 4000, 0.5)
    np.testing.assert_allclose(logprob.detach(), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(entropy.detach(), want_entropy, rtol=1e-6, atol=1e-6)
    assert (leaf.grad[:, masked] == 0).all()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 1, 2, 63, 64, 129])
def test_a_column_of_plus_infinity_makes_its_row_nan(dtype, column):
    logits = torch.randn(3, 130).to(dtype)
    logits[1, column] = torch.inf
    logprob, entropy = gather_logprobs_entropy(logits, torch.tensor([5, 5, 5]))
    for values in (logprob, entropy):
        assert values.isnan().tolist() == [False, True, False]


def test_a_minus_infinity_label_has_log_prob_minus_infinity():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert gather_logprobs(logits, torch.tensor([1]))[0] == -torch.inf


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_nan_stays_in_its_row(dtype):
    logits, labels, g, h = case(4097, dtype)
    clean = logits.clone().requires_grad_()
    logits[2, 4000], logits[3] = torch.nan, torch.nan
    dirty = logits.clone().requires_grad_()
    outs = []
    for leaf in (clean, dirty):
        logprob, entropy = vocab_parallel_logprobs(leaf, labels, vocab_valid=4097, with_entropy=True)
        (logprob * g + entropy * h).sum().backward()
        outs.append((logprob.detach(), entropy.detach(), leaf.grad))
    for good, bad in zip(*outs, strict=True):
        assert torch.equal(good[[0, 1, 4]], bad[[0, 1, 4]])
        assert bad[2].isnan().all()
        assert bad[3].isnan().all()


def test_logits_at_scale_1e4_keep_their_digits():
    logits, labels, _, _ = case(1000, torch.float32, rows=40)
    logits = logits + 1e4  # exact differences of about 1e-3 remain
    want, want_entropy, _ = logprob_oracle(logits, labels, 1000)
    logprob, entropy = vocab_parallel_logprobs(logits, labels, vocab_valid=1000, with_entropy=True)
    np.testing.assert_allclose(logprob, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(entropy, want_entropy, rtol=1e-6, atol=1e-6)
    wide = logits * torch.linspace(-1, 1, 1000)
    want, _, _ = logprob_oracle(wide, labels, 1000)
    np.testing.assert_allclose(gather_logprobs(wide, labels.clamp(min=0))[1:], want[1:], rtol=3e-7)


def test_no_rows_and_all_rows_unlabelled_give_zeros():
    empty = torch.randn(0, 7, requires_grad=True)
    logprob, entropy = vocab_parallel_logprobs(empty, torch.empty(0).long(), vocab_valid=7, with_entropy=True)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == (0,)
    assert empty.grad.shape == (0, 7)
    logits = torch.full((3, 7), torch.nan, requires_grad=True)
    logprob, entropy = vocab_parallel_logprobs(logits, torch.full((3,), -1), vocab_valid=7, with_entropy=True)
    (logprob.sum() + entropy.sum()).backward()
    assert (logprob == 0).all()
    assert (entropy == 0).all()
    assert (logits.grad == 0).all()


def test_offsets_beyond_2_to_the_31_elements_are_reached():
    rows, stride, vocab = 3, 2**30 + 8, 1000
    storage = torch.empty(rows * stride, dtype=torch.bfloat16)  # only written pages take memory
    logits = torch.as_strided(storage, (rows, vocab), (stride, 1))
    values = torch.randn(rows, vocab).bfloat16()
    logits.copy_(values)
    labels = torch.tensor([5, 999, 0])
    dense = values.clone().requires_grad_()
    want = vocab_parallel_logprobs(dense, labels, vocab_valid=vocab)[0]
    want.sum().backward()
    logits.requires_grad_()
    got = vocab_parallel_logprobs(logits, labels, vocab_valid=vocab, inplace_backward=True)[0]
    assert torch.equal(got, want)
    torch.autograd.grad(got.sum(), logits)
    assert torch.equal(logits.detach(), dense.grad)


def test_the_public_functions_take_packed_and_batched_tensors():
    input_ids = torch.randint(0, 50, (9,))
    logits = torch.randn(9, 50)
    labels = torch.roll(input_ids, -1)
    want = logits.log_softmax(-1)[torch.arange(9), labels]
    torch.testing.assert_close(gather_logprobs(logits, labels), want)
    torch.testing.assert_close(gather_logprobs(logits.view(3, 3, 50), labels.view(3, 3)), want.view(3, 3))
    half = gather_logprobs_entropy(logits, labels, torch.full((9,), 0.5))
    torch.testing.assert_close(half[0], (logits / 0.5).log_softmax(-1)[torch.arange(9), labels])
    torch.testing.assert_close(half[1], torch.distributions.Categorical(logits=logits / 0.5).entropy())
    torch.testing.assert_close(gather_logprobs(logits, labels.int(), 0.5), half[0])
