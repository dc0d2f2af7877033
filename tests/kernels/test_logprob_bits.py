"""Log-prob kernels: repeatable bits, splits of the vocabulary, and no writes outside of outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DTYPES, Guarded

from megarl.ops import logprob_kernels as kernels
from megarl.ops.logprob import vocab_parallel_logprobs
from megarl.ops.native import _C, DTYPE_CODES, where


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def results_and_gradient(logits, labels, vocab, g, h):
    leaf = logits.detach().requires_grad_()
    logprob, entropy = vocab_parallel_logprobs(leaf, labels, vocab_valid=vocab, with_entropy=True)
    (logprob * g + entropy * h).sum().backward()
    return logprob.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [33, 50257])
def test_a_row_gives_the_same_bits_for_every_thread_count_position_and_stride(dtype, vocab):
    rows = 24
    logits = torch.randn(rows, vocab).to(dtype)
    labels = torch.randint(0, vocab, (rows,))
    g, h = torch.randn(rows), torch.randn(rows)
    torch.set_num_threads(1)
    want = results_and_gradient(logits, labels, vocab, g, h)
    order = torch.randperm(rows)
    spread = torch.empty(rows * (vocab + 13) + 1, dtype=dtype)[1:].view(rows, vocab + 13)[:, :vocab]
    spread.copy_(logits[order])
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        for got, expected in zip(results_and_gradient(logits, labels, vocab, g, h), want, strict=True):
            assert torch.equal(got, expected)
        for got, expected in zip(
            results_and_gradient(spread, labels[order], vocab, g[order], h[order]), want, strict=True
        ):
            assert torch.equal(got, expected[order])


def sharded(logits, labels, cuts, temperature=1.0):
    """Computes log-prob, entropy and gradients from vocabulary shards at `cuts`, merged like the ranks of a group."""
    inv_temp = kernels.inverse_temperature(temperature, logits)
    vocab = logits.shape[1]
    bounds = [0, *sorted(cuts), vocab]
    shards = [(a, logits[:, a:b].contiguous()) for a, b in itertools.pairwise(bounds)]
    stats = [kernels.logprob_stats(x, labels, inv_temp, vocab, start, True) for start, x in shards]
    logprob, entropy, context = kernels.logprob_merge(torch.stack(stats), labels, inv_temp)
    g = torch.linspace(-1, 1, len(labels), dtype=context.dtype)
    grads = [
        kernels.logprob_backward(x, labels, inv_temp, context, g, g.flip(0).contiguous(), vocab, start)
        for start, x in shards
    ]
    return logprob, entropy, torch.cat(grads, 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_split_of_the_vocabulary_equals_the_whole(data):
    vocab = data.draw(st.integers(1, 300))
    cuts = data.draw(st.lists(st.integers(0, vocab), max_size=7))
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, dtype=torch.float64, generator=generator) * data.draw(st.sampled_from([1, 50]))
    if data.draw(st.booleans()) and vocab > 2:
        logits[1, : vocab - 1] = -torch.inf  # shards without probability
    labels = torch.randint(0, vocab, (4,), generator=generator)
    labels[1] = vocab - 1
    labels[2] = -1
    for got, want in zip(sharded(logits, labels, cuts), sharded(logits, labels, []), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_of_every_dtype_merge(dtype):
    logits, labels = torch.randn(16, 1000).to(dtype), torch.randint(0, 1000, (16,))
    for got, want in zip(sharded(logits, labels, [0, 250, 251, 999]), sharded(logits, labels, []), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2 if got.dtype == torch.bfloat16 else 2e-3, atol=2e-6)


def test_a_shard_that_is_all_padding_changes_nothing():
    logits, labels = torch.randn(5, 20), torch.tensor([0, 19, 3, 7, -1])
    inv_temp = kernels.inverse_temperature(1.0, logits)
    real = kernels.logprob_stats(logits, labels, inv_temp, 20, 0, True)
    padding = kernels.logprob_stats(torch.full((5, 8), torch.nan), labels, inv_temp, 20, 20, True)
    alone = kernels.logprob_merge(real[None], labels, inv_temp)
    for got, want in zip(kernels.logprob_merge(torch.stack([real, padding]), labels, inv_temp), alone, strict=True):
        assert torch.equal(got, want)


def test_a_label_outside_all_shards_gives_nan():
    logits, labels = torch.randn(2, 8), torch.tensor([3, 12])
    inv_temp = kernels.inverse_temperature(1.0, logits)
    stats = kernels.logprob_stats(logits, labels, inv_temp, 16, 0, True)  # the shard of columns 8..15 is missing
    logprob, _, _ = kernels.logprob_merge(stats[None], labels, inv_temp)
    assert logprob[0].isfinite()
    assert logprob[1].isnan()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("vocab", [1, 15, 33, 4097])
def test_kernels_fill_their_outputs_and_write_nothing_else(dtype, vocab):
    rows, stride = 6, vocab + 5
    wide = kernels.stats_dtype(dtype)
    source = Guarded((rows, stride), dtype)
    source.tensor.copy_(torch.randn(rows, stride))
    source.tensor[:, vocab - 1 :] = torch.nan if vocab > 1 else 0.5  # the last column is padding
    valid = max(vocab - 1, 1)
    labels = torch.tensor([0, -1, valid - 1, 0, 0, 0])
    inv_temp = torch.ones(1, dtype=torch.float64)
    shape = _C.LogitRows(rows, vocab, valid, stride, 0, DTYPE_CODES[dtype])
    here = where(source.tensor)
    stats, logprob = Guarded((1, rows, 4), wide), Guarded((rows,), wide)
    entropy, context = Guarded((rows,), wide), Guarded((rows, 3), wide)
    before = source.raw.clone()
    at = [t.data_ptr() for t in (source.tensor, labels, inv_temp)]
    _C.logprob_stats(here, shape, *at, 0, True, stats.tensor.data_ptr())
    outputs = [b.tensor.data_ptr() for b in (logprob, entropy, context)]
    _C.logprob_merge(here, 1, rows, DTYPE_CODES[wide], stats.tensor.data_ptr(), *at[1:], 0, *outputs)
    g = torch.ones(rows, dtype=wide)
    grad = Guarded((rows, vocab + 2), dtype)
    _C.logprob_backward(
        *(here, shape, at[0], grad.tensor.data_ptr(), vocab + 2, *at[1:], 0),
        *(context.tensor.data_ptr(), g.data_ptr(), g.data_ptr()),
    )
    assert torch.equal(source.raw, before)
    for buffer in (stats, logprob, entropy, context):
        assert buffer.check().isfinite().all()
    written = grad.check()
    assert written[:, :vocab].isfinite().all()
    assert written[:, vocab:].isnan().all()
    _C.logprob_backward(
        *(here, shape, at[0], at[0], stride, *at[1:], 0, context.tensor.data_ptr(), g.data_ptr(), g.data_ptr())
    )
    after = source.check()
    assert torch.equal(after[:, :vocab], written[:, :vocab])
    assert torch.equal(
        after[:, vocab:].view(torch.uint8), before[64:-64].view(dtype).view(rows, stride)[:, vocab:].view(torch.uint8)
    )
