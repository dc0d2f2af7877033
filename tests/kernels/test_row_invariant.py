"""Operations of a deterministic run: a row has the same bits alone, in any batch, at any place and with any padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.ops import row_invariant

COUNTS = (1, 2, 3, 5, 7, 8, 9, 17, 64, 101)  # numbers of rows computed together
SCALE = 0.25


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def parts(rows: int) -> Iterator[slice]:
    """Yields slices of consecutive rows, with each length in COUNTS, from several starts."""
    for count in COUNTS:
        for start in (0, 1, 6, rows - count):
            yield slice(start, start + count)


@pytest.mark.parametrize(("inner", "outer"), [(64, 64), (192, 64), (64, 353), (100, 50), (896, 1152), (1000, 384)])
def test_a_product_of_a_row_does_not_depend_on_the_other_rows_or_columns(inner: int, outer: int) -> None:
    x, weight, bias = torch.randn(128, inner), torch.randn(outer, inner), torch.randn(outer)
    whole = row_invariant.linear(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), atol=2e-4, rtol=1e-5)
    for part in parts(128):
        assert torch.equal(row_invariant.linear(x[part].clone(), weight, bias), whole[part]), part
    order = torch.randperm(outer)
    assert torch.equal(row_invariant.linear(x, weight[order], bias[order]), whole[:, order])
    assert torch.equal(
        row_invariant.linear(x, weight[: outer // 2 + 1]), row_invariant.linear(x, weight)[:, : outer // 2 + 1]
    )


@pytest.mark.parametrize(("inner", "outer"), [(16, 96), (24, 40), (64, 352), (176, 64)])
def test_a_product_does_not_depend_on_how_ranks_cut_it(inner: int, outer: int) -> None:
    """Columns: any rank's rows of the weight. Inputs: subtrees of the fixed summands, added in pairs."""
    x, weight = torch.randn(9, inner), torch.randn(outer, inner)
    whole = row_invariant.linear(x, weight)
    for ranks in (2, 4, 8):
        assert torch.equal(torch.cat([row_invariant.linear(x, cut) for cut in weight.chunk(ranks)], 1), whole)
    whole = row_invariant.linear_of_summands(x, weight, weight[:, 0], summands=8)
    torch.testing.assert_close(whole, F.linear(x, weight, weight[:, 0]), atol=1e-4, rtol=1e-5)
    for ranks in (2, 4, 8):
        parts = zip(x.chunk(ranks, dim=1), weight.chunk(ranks, dim=1), strict=True)
        partial = [row_invariant.linear_of_summands(*part, summands=8 // ranks) for part in parts]
        assert torch.equal(row_invariant.sum_in_pairs(partial) + weight[:, 0], whole)


def test_torchs_own_product_depends_on_its_columns() -> None:
    """Shows why `linear` cuts and pads columns. If this test fails, the blocks can be removed."""
    sizes = itertools.product((1, 9, 64), (8, 16, 100), (16, 24, 50), (2, 4, 8))  # which of them do is the CPU's matter
    cases = [(torch.randn(rows, inner), torch.randn(outer, inner), ranks) for rows, inner, outer, ranks in sizes]
    assert not all(
        torch.equal(torch.cat([F.linear(x, cut) for cut in weight.chunk(ranks)], 1), F.linear(x, weight))
        for x, weight, ranks in cases
    )


def test_torchs_own_product_of_few_rows_does_depend_on_them() -> None:
    """Shows why `linear` pads rows. If this test fails, the padding can be removed."""
    x, weight = torch.randn(128, 64), torch.randn(64, 64)
    assert not all(torch.equal(F.linear(x[part], weight), F.linear(x, weight)[part]) for part in parts(128))


def test_an_activation_does_not_depend_on_its_place() -> None:
    x = torch.randn(128, 37) * 5
    whole = row_invariant.silu(x)
    torch.testing.assert_close(whole, F.silu(x))
    for part in parts(128):
        assert torch.equal(row_invariant.silu(x[part]), whole[part])
        beside = torch.cat([x[part], torch.randn(part.stop - part.start, 3)], dim=1)
        assert torch.equal(row_invariant.silu(beside[:, :37]), whole[part])


def test_a_norm_equals_the_servers_and_does_not_depend_on_the_other_rows() -> None:
    for width in (16, 64, 100, 896):
        x, weight = torch.randn(128, width), torch.randn(width)
        whole = F.rms_norm(x, (width,), weight, 1e-6)
        assert torch.equal(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight, whole)
        for part in parts(128):
            assert torch.equal(F.rms_norm(x[part].clone(), (width,), weight, 1e-6), whole[part])


def test_angles_do_not_depend_on_their_place() -> None:
    angles = torch.arange(128)[:, None].float() * (1e4 ** -(torch.arange(0, 26, 2).float() / 26))
    for function in (torch.cos, torch.sin):
        whole = function(angles)
        assert all(torch.equal(function(angles[part].clone()), whole[part]) for part in parts(128))


def causal(length: int) -> Tensor:
    return torch.ones(1, length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (4, 4, 32), (14, 2, 64)])
def test_attention_does_not_depend_on_batch_padding_or_how_many_tokens_come_at_once(
    heads: int, kv_heads: int, dim: int
) -> None:
    length = 150  # three blocks of keys, the last one incomplete
    query = torch.randn(5, heads, length, dim)
    key, value = torch.randn(5, kv_heads, length, dim), torch.randn(5, kv_heads, length, dim)
    whole = row_invariant.attention(query, key, value, causal(length), SCALE)
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(whole, plain, atol=3e-6, rtol=1e-5)
    for seq, size in ((0, 150), (2, 149), (4, 65), (1, 64), (3, 5), (3, 1)):  # alone, and truncated
        only = slice(seq, seq + 1)
        alone = row_invariant.attention(
            query[only, :, :size], key[only, :, :size], value[only, :, :size], causal(size), SCALE
        )
        assert torch.equal(alone, whole[only, :, :size])
        cached = size // 2  # a prefill after a cached prefix
        later = row_invariant.attention(
            query[only, :, cached:size], key[only, :, :size], value[only, :, :size], causal(size)[:, cached:], SCALE
        )
        assert torch.equal(later, whole[only, :, cached:size])
    for lengths in (
        [150, 3, 70, 64, 129],
        [1, 2, 3, 4, 5],
        [9, 63, 65, 8, 7],
    ):  # a decode step of sequences with these lengths
        sizes = torch.tensor(lengths)
        visible = torch.arange(int(sizes.max())) < sizes[:, None]
        last = query[torch.arange(5), :, sizes - 1][:, :, None]
        seen = (x[:, :, : visible.shape[1]] for x in (key, value))
        decoded = row_invariant.attention(last, *seen, visible[:, None], SCALE)
        assert torch.equal(decoded[:, :, 0], whole[torch.arange(5), :, sizes - 1])


def test_blocks_of_a_long_context_are_summed_in_order() -> None:
    """torch sums five terms of few elements in another order than those of many."""
    length = 350
    query, key, value = (torch.randn(3, heads, length, 16) for heads in (4, 2, 2))
    whole = row_invariant.attention(query, key, value, causal(length), SCALE)
    for last in (257, 300, 350):
        last_one = query[:1, :, last - 1 : last]
        visible = torch.ones(1, 1, last, dtype=torch.bool)
        decoded = row_invariant.attention(last_one, key[:1, :, :last], value[:1, :, :last], visible, SCALE)
        assert torch.equal(decoded, whole[:1, :, last - 1 : last])


def test_gradients_match_torch() -> None:
    query, key, value = (torch.randn(3, n, 70, 16, requires_grad=True) for n in (4, 2, 2))
    weight, x = torch.randn(64, 16, requires_grad=True), torch.randn(5, 16, requires_grad=True)
    far = torch.cat([x, torch.full((1, 16), -120.0)])  # exp overflows here
    pairs = [
        (
            row_invariant.attention(query, key, value, causal(70), SCALE),
            F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True),
            (query, key, value),
        ),
        (row_invariant.linear(x, weight), F.linear(x, weight), (x, weight)),
        (row_invariant.silu(far), F.silu(far), (x,)),
    ]
    for ours, theirs, inputs in pairs:
        gradient = torch.randn_like(ours)
        grads, expected = (torch.autograd.grad(out, inputs, gradient) for out in (ours, theirs))
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_log_probs_do_not_depend_on_the_batch_the_padding_or_the_form_of_the_temperature() -> None:
    logits, labels = torch.randn(128, 360) * 4, torch.randint(0, 353, (128,))
    whole, entropy = row_invariant.logprobs(logits, labels, 0.7, 353, with_entropy=True)
    expected = (logits[:, :353] / 0.7).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    assert entropy is not None
    for part in parts(128):
        count = part.stop - part.start
        server = row_invariant.logprobs(logits[part, :353].clone(), labels[part], torch.full((count,), 0.7), 353)
        assert torch.equal(server[0], whole[part])
        assert server[1] is None
