"""Operations of a generation step on CPU against their plain-torch twins, over odd shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cpu import decode, torch_twins

WIDTHS = st.sampled_from([1, 15, 16, 17, 64, 100])
SEEDS = st.integers(0, 1000)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draws(count: int, seed: int) -> torch.Tensor:
    """Uniform draws from [0, 1)."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pages(rows: int, kv_heads: int, dim: int, seed: int, dtype: torch.dtype = torch.float32):
    """Builds a cache with random slots for `rows + 2` requests of up to 40 tokens, and chooses rows of them."""
    generator = torch.Generator().manual_seed(seed)
    requests, longest = rows + 2, 40
    table = torch.randperm(requests * longest, generator=generator).int().view(requests, longest)
    keys, values = (randn(requests * longest, kv_heads, dim, seed=seed + i, dtype=dtype) for i in (1, 2))
    chosen = torch.randint(0, requests, (rows,), generator=generator)
    return keys, values, table, chosen, torch.randint(0, longest, (rows,), generator=generator)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 5), width=WIDTHS, updated=st.booleans(), seed=SEEDS)
def test_the_norm_adds_the_update_and_keeps_the_sum(rows, width, updated, seed):
    residual, update, weight = randn(rows, width, seed=seed), randn(rows, width, seed=seed + 1), randn(width, seed=2)
    expected_sum = residual.clone()
    expected = torch_twins.add_rms_norm(expected_sum, update if updated else None, weight, 1e-6)
    got = decode.add_rms_norm(residual, update if updated else None, weight, 1e-6)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(residual, expected_sum)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5), kv_heads=st.integers(1, 3), group=st.integers(1, 3), dim=st.sampled_from([16, 48, 64]),
    normed=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_queries_and_keys_are_normed_rotated_and_stored(rows, kv_heads, group, dim, normed, seed):
    keys, values, _, _, positions = pages(rows, kv_heads, dim, seed)
    qkv = randn(rows, (group + 2) * kv_heads * dim, seed=seed + 3)
    slots = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))[:rows]
    norms = {"q_norm": randn(dim, seed=4), "k_norm": randn(dim, seed=5), "eps": 1e-5} if normed else {}
    cos_sin = randn(40, dim, seed=6)
    other_keys, other_values = keys.clone(), values.clone()
    expected = torch_twins.rotate_and_store(qkv, other_keys, other_values, slots, positions, cos_sin, **norms)
    got = decode.rotate_and_store(qkv, keys, values, slots, positions, cos_sin, **norms)
    for actual, twin in ((got, expected), (keys, other_keys), (values, other_values)):
        torch.testing.assert_close(actual, twin, atol=2e-6, rtol=2e-6)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 6), kv_heads=st.integers(1, 3), group=st.integers(1, 3), dim=st.sampled_from([16, 48, 128]),
    window=st.sampled_from([0, 1, 5, 16]), dtype=st.sampled_from(decode.ATTENTION_DTYPES), seed=SEEDS,
)  # fmt: skip
def test_a_row_attends_to_its_own_sequence_up_to_its_token(rows, kv_heads, group, dim, window, dtype, seed):
    keys, values, table, requests, positions = pages(rows, kv_heads, dim, seed, dtype)
    # The row stride is larger than a row, as for queries in a qkv tensor.
    queries = randn(rows, group * kv_heads + 1, dim, seed=seed + 3, dtype=dtype)[:, :-1]
    unseen = torch.ones(len(keys), dtype=torch.bool)
    for request, position in zip(requests, positions, strict=True):
        unseen[table[request, : position + 1].long()] = False
    keys[unseen] = values[unseen] = torch.nan  # a stale slot may hold anything
    expected = torch_twins.paged_attention(queries, keys, values, table, requests, positions, 0.3, window)
    got = decode.paged_attention(queries, keys, values, table, requests, positions, 0.3, window)
    tolerance = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_a_rows_attention_does_not_depend_on_the_other_rows():
    keys, values, table, requests, positions = pages(6, 2, 32, 0)
    queries = randn(6, 4, 32, seed=1)
    whole = decode.paged_attention(queries, keys, values, table, requests, positions, 0.3)
    for row in range(6):
        only = slice(row, row + 1)
        alone = decode.paged_attention(queries[only], keys, values, table, requests[only], positions[only], 0.3)
        assert torch.equal(alone[0], whole[row])


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 4), width=WIDTHS, scale=st.sampled_from([1.0, 30.0, 1e4]), seed=SEEDS)
def test_the_gated_activation_is_silu_times_up(rows, width, scale, seed):
    gate_up = randn(rows, 2 * width, seed=seed) * scale
    torch.testing.assert_close(decode.silu_mul(gate_up), torch_twins.silu_mul(gate_up), atol=1e-6, rtol=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 5), vocab=st.sampled_from([1, 2, 15, 16, 17, 353]), spread=st.sampled_from([0.0, 1.0, 20.0]),
    cold=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_sampled_tokens_and_logprobs_match_the_softmax(rows, vocab, spread, cold, seed):
    logits, uniform = randn(rows, vocab, seed=seed) * spread, draws(rows, seed)
    logits[:, vocab // 2 + 1 :: 3] = -torch.inf  # tokens that must never be sampled
    temperature = torch.full((rows,), 0.3 if cold else 1.7)
    tokens, logprobs = decode.sample(logits.clone(), temperature, uniform)
    exact = (logits.double() / temperature[:, None]).log_softmax(-1)
    chosen = exact.gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs, chosen.float(), atol=1e-6, rtol=1e-6)
    twin_tokens, twin_logprobs = torch_twins.sample(logits, temperature, uniform)
    equal = tokens == twin_tokens
    assert torch.allclose(logprobs[equal], twin_logprobs[equal], atol=1e-6, rtol=1e-6)
    # The draw lies in the token's interval of the cumulative probabilities, up to rounding.
    end = exact.exp().cumsum(-1).gather(1, tokens.long()[:, None])[:, 0]
    assert ((uniform < end + 1e-6) & (uniform > end - chosen.exp() - 1e-6)).all()


def test_draws_give_each_token_its_probability():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -1.0, 0.5] * 4]).expand(200_000, -1)
    tokens, _ = decode.sample(logits.contiguous(), torch.full((200_000,), 0.8), draws(200_000, seed=0))
    expected = (logits[0] / 0.8).softmax(-1)
    counts = torch.bincount(tokens, minlength=24)
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - 200_000 * expected).square() / (200_000 * expected))[expected > 0].sum()
    assert chi_square < 60  # 19 degrees of freedom: one seed in 260,000 exceeds it


@pytest.mark.parametrize("draw", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_give_possible_tokens(draw):
    logits = torch.tensor([[-torch.inf, *[0.1] * 30, -torch.inf, -200.0]])
    tokens, logprobs = decode.sample(logits, torch.ones(1), torch.tensor([draw], dtype=torch.float64))
    assert tokens.item() == (1 if draw == 0 else 30)
    assert logprobs.item() == pytest.approx(-3.4011974)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_a_distribution_gives_token_0_and_nan(value):
    logits = torch.zeros(2, 20)
    logits[0] = value
    tokens, logprobs = decode.sample(logits, torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64))
    assert tokens.tolist() == [0, 10]
    assert logprobs.isnan().tolist() == [True, False]


def test_error_messages_name_the_argument_and_the_rule():
    keys, values, table, requests, positions = pages(2, 2, 16, 0)
    good = (randn(2, 4, 16, seed=0), keys, values, table, requests, positions, 0.3)
    for index, wrong, message in (
        (0, randn(2, 3, 16, seed=0), "3 heads of 16, the cache 2 of 16"),
        (0, randn(2, 4, 16, seed=0).double(), "queries have dtype torch.float64"),
        (2, values[:, :1], "values has shape"),
        (3, table.long(), "table has dtype torch.int64"),
        (4, requests[:1], "requests has shape"),
        (0, randn(2, 16, 4, seed=0).transpose(1, 2), "queries have strides"),
    ):
        with pytest.raises(ValueError, match=message):
            decode.paged_attention(*good[:index], wrong, *good[index + 1 :])
    with pytest.raises(ValueError, match="qkv has 40 columns"):
        decode.rotate_and_store(randn(2, 40, seed=0), keys, values, requests, positions, randn(40, 16, seed=0))
    with pytest.raises(ValueError, match="uniform has dtype"):
        decode.sample(randn(2, 5, seed=0), torch.ones(2), torch.rand(2))


@pytest.mark.parametrize(
    ("what", "index", "size"),
    [("position", -1, 8), ("position", 8, 8), ("request", 2, 2), ("slot", 16, 16), ("slot", -1, 16)],
)
def test_attention_refuses_indices_outside_of_the_table_or_the_cache(what: str, index: int, size: int) -> None:
    keys, values = (torch.zeros(16, 1, 16) for _ in range(2))
    table, requests, positions = torch.zeros(2, 8, dtype=torch.int32), torch.tensor([1, 0]), torch.tensor([7, 3])
    for changed, place in ((positions, 1), (requests, 1), (table[0], 3)):
        if what == ("position", "request", "slot")[(changed is not positions) + (changed.dtype == torch.int32)]:
            changed[place] = index
    queries = torch.zeros(2, 1, 16)
    with pytest.raises(IndexError, match=rf"^row 1 has {what} {index}, which is not in \[0, {size}\)$"):
        decode.paged_attention(queries, keys, values, table, requests, positions, 1.0)


def test_attention_reads_no_slot_before_its_window() -> None:
    keys, values = (torch.ones(16, 1, 16) for _ in range(2))
    table = torch.tensor([[99, 99, 0, 1]], dtype=torch.int32)
    attended = decode.paged_attention(
        torch.zeros(1, 1, 16), keys, values, table, torch.tensor([0]), torch.tensor([3]), 1.0, window=2
    )
    assert torch.equal(attended, torch.ones_like(attended))


@pytest.mark.parametrize(("what", "index", "size"), [("position", 4, 4), ("position", -1, 4), ("slot", 16, 16)])
def test_the_cache_refuses_positions_and_slots_that_it_does_not_have(what: str, index: int, size: int) -> None:
    keys, values = (torch.zeros(16, 1, 16) for _ in range(2))
    slots, positions = torch.tensor([0, 1]), torch.tensor([0, 1])
    (slots if what == "slot" else positions)[1] = index
    with pytest.raises(IndexError, match=rf"^row 1 has {what} {index}, which is not in \[0, {size}\)$"):
        decode.rotate_and_store(torch.zeros(2, 48), keys, values, slots, positions, torch.zeros(4, 16))
    assert not keys.any(), "nothing is stored"
