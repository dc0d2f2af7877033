"""Attention over shared beginnings equals attention over whole sequences, by a twin of torch's flash attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.actor.batch import shared_prefix
from megarl.actor.batch.context_parallel import Cut
from megarl.actor.batch.microbatch import build_microbatch
from megarl.actor.batch.shared_prefix import pad, share, share_in_segments, units
from megarl.actor.model.attention.packed import PackedAttention, PackedBounds, pack_in_blocks
from megarl.actor.model.attention.prefix import PackedSegments, attend, pack_segments, with_shared_prompts
from megarl.types import PackedBatch, cu_seqlens_of
from tests.te import flash_calls, flash_twin

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    """Shares branches of few tokens, and computes flash attention by its twin."""
    flash_twin.register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "PAGE", 2)
        yield


@st.composite
def trees(draw: st.DrawFn) -> PackedBatch:
    """Groups of sequences that continue random beginnings of earlier ones in their group; ids of groups are mixed."""
    sequences: list[tuple[int, list[int]]] = []
    for group in range(draw(st.integers(1, 3))):
        root = draw(st.lists(st.integers(0, 1), max_size=9))
        members = [root + draw(st.lists(st.integers(0, 2), max_size=6))]
        for _ in range(draw(st.integers(0, 4))):
            base = draw(st.sampled_from(members))
            cut = draw(st.integers(min(len(root), len(base)), len(base)))
            members.append(base[:cut] + draw(st.lists(st.integers(0, 2), max_size=6)))
        sequences += [(group, ids) for ids in members]
    sequences = draw(st.permutations(sequences))
    if not any(ids for _, ids in sequences):
        sequences.append((9, [0]))
    lengths = torch.tensor([len(ids) for _, ids in sequences])
    tokens = torch.tensor([token for _, ids in sequences for token in ids])
    groups = torch.tensor([group for group, _ in sequences])
    return PackedBatch(cu_seqlens_of(lengths), {"input_ids": tokens}, {"group_ids": groups})


def conversation_tree() -> PackedBatch:
    """Three conversations with one system prompt, which part after 10, 16 and 22 tokens, and one of another prompt."""
    turns = list(range(30))
    rows = [turns, turns[:22] + [50] * 7, turns[:16] + [51] * 4, turns[:10] + [52] * 9, [60] * 5]
    ids = [torch.tensor(row) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    groups = torch.tensor([0, 0, 0, 0, 1])
    return PackedBatch(cu_seqlens_of(lengths), {"input_ids": torch.cat(ids)}, {"group_ids": groups})


def whole_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Causal attention of whole sequences, one at a time."""
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def inputs_of(tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, dim, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2)]


def both(batch: PackedBatch, dim: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Output of all tokens and gradients of queries, keys and values: by segments, and of whole sequences."""
    shared = share_in_segments(batch)
    packed = pack_segments(batch.cu_seqlens, CPU, shared=shared)
    inputs, scale = inputs_of(len(shared.source), dim, dtype), 0.3
    if isinstance(packed, PackedSegments):
        out = attend(*inputs, packed, scale)[shared.rows]
    else:
        assert isinstance(packed, PackedBounds)
        out = whole_attention(*inputs, packed.cu_seqlens_q.diff().tolist(), scale)[shared.rows]
    expected = whole_attention(*(x[shared.rows] for x in inputs), batch.lengths.tolist(), scale)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [[x.detach(), *torch.autograd.grad(x, inputs, upstream)] for x in (out, expected)]


@settings(max_examples=30)
@given(trees(), st.sampled_from([8, 12, 3]))
def test_attention_by_segments_is_attention_of_whole_sequences(batch: PackedBatch, dim: int) -> None:
    torch.testing.assert_close(*both(batch, dim), atol=1e-5, rtol=1e-5)


def test_a_part_may_have_one_query() -> None:
    ids = torch.tensor([5, 6, 7, 5, 6])
    batch = PackedBatch(torch.tensor([0, 3, 5]), {"input_ids": ids}, {"group_ids": torch.tensor([0, 0])})
    torch.testing.assert_close(*both(batch, 8), atol=1e-5, rtol=1e-5)


def test_in_bfloat16_the_difference_is_that_of_its_rounding() -> None:
    exact = both(conversation_tree(), 16)[1]
    by_segments, whole = both(conversation_tree(), 16, torch.bfloat16)
    for reference, first, second in zip(exact, by_segments, whole, strict=True):
        error, usual = ((x.float() - reference).norm() / reference.norm() for x in (first, second))
        assert error <= 2 * usual
        assert error <= 2**-6


def test_a_conversation_is_read_by_its_branches() -> None:
    batch = conversation_tree()
    shared = share_in_segments(batch)
    # Ends of shared pages of 2 tokens, without the last page: 20 of 22, 14 of 16, and all of the 10 that all share.
    assert [(s.start, s.length, s.parent) for s in shared.segments] == [
        (0, 10, -1),
        (10, 4, 0),
        (89, 9, 0),
        (14, 6, 1),
        (73, 6, 1),
        (20, 10, 3),
        (50, 9, 3),
        (98, 5, -1),
    ]
    packed = pack_segments(batch.cu_seqlens, CPU, shared=shared)
    assert isinstance(packed, PackedSegments)
    assert packed.children == slice(10, 10 + 4 + 9 + 6 + 6 + 10 + 9)
    assert packed.earlier.queries.tolist() == [0, 13, 25, 44]
    assert packed.earlier.keys.tolist() == [0, 10, 24, 44]
    assert torch.equal(packed.positions[shared.rows], torch.cat([torch.arange(n) for n in batch.lengths.tolist()]))


def test_keys_of_plain_prompts_are_not_gathered() -> None:
    ids = torch.tensor([1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 7, 8, 9, 7, 7, 9])
    bounds = cu_seqlens_of(torch.tensor([4, 4, 1, 4, 3]))
    batch = PackedBatch(bounds, {"input_ids": ids}, {"group_ids": torch.tensor([0, 0, 1, 2, 2])})
    shared = share_in_segments(batch)
    packed = pack_segments(bounds, CPU, shared=shared)
    assert isinstance(packed, PackedSegments)
    assert packed.ancestors == slice(0, 5)
    assert shared.source.tolist() == [0, 1, 2, 9, 10, 3, 7, 11, 12, 15, 8]


def test_without_a_common_beginning_sequences_are_packed_by_their_bounds() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    bounds = cu_seqlens_of(torch.tensor([2, 3, 1]))
    batch = PackedBatch(bounds, {"input_ids": ids}, {"group_ids": torch.tensor([0, 0, 1])})
    packed = pack_segments(bounds, CPU, shared=share_in_segments(batch))
    assert isinstance(packed, PackedBounds)
    assert packed.cu_seqlens_q.tolist() == bounds.tolist()


@settings(max_examples=30)
@given(trees(), st.sampled_from([1, 2, 4]))
def test_both_orders_read_the_same_tokens(batch: PackedBatch, multiple: int) -> None:
    position = torch.cat([torch.arange(n) for n in batch.lengths.tolist()])
    plain, by_segments = share(batch), share_in_segments(batch)
    assert torch.equal(by_segments.source.sort().values, plain.source)
    for shared, pack in ((plain, pack_in_blocks), (by_segments, pack_segments)):
        assert torch.equal(batch["input_ids"][shared.source][shared.rows], batch["input_ids"])
        bounds, padded = pad(shared, batch.cu_seqlens, multiple)
        packed: Any = pack(bounds, CPU, shared=padded)
        assert len(padded.source) % multiple == 0
        if not isinstance(packed, PackedBounds):
            assert torch.equal(packed.positions[shared.rows], position)


@settings(max_examples=30)
@given(trees(), st.sampled_from([1, 4]))
def test_blocks_over_a_tree_are_attention_of_whole_sequences(batch: PackedBatch, multiple: int) -> None:
    bounds, padded = pad(share(batch), batch.cu_seqlens, multiple)
    inputs = inputs_of(len(padded.source), 8)
    attention = PackedAttention(type("Config", (), {"kv_channels": 8, "context_parallel_size": 1}))
    out = attention(*inputs, None, packed_seq_params=pack_in_blocks(bounds, CPU, shared=padded))
    rows = padded.rows[: batch.total_tokens]
    expected = whole_attention(*(x[rows] for x in inputs), batch.lengths.tolist(), 8**-0.5)
    torch.testing.assert_close(out[rows], expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30)
@given(trees(), st.integers(1, 30))
def test_a_part_of_a_group_reads_no_more_than_was_counted(batch: PackedBatch, max_tokens: int) -> None:
    members, sizes = units(batch, max_tokens, shared=True)
    assert sorted(i for unit in members for i in unit) == list(range(batch.num_seqs))
    for unit, size in zip(members, sizes, strict=True):
        assert len(share(batch.select(unit)).source) <= size
    for unit, size in zip(*units(batch, 1000, shared=True), strict=True):  # whole groups
        assert len(share(batch.select(unit)).source) == size
    together = members[0] + members[-1] if len(members) > 1 else members[0]
    read = len(share(batch.select(together)).source)
    assert read <= sizes[0] + (sizes[-1] if len(members) > 1 else 0)


def test_padding_for_sequence_parallelism_is_read_and_returned_by_no_token() -> None:
    batch = conversation_tree()
    mb = build_microbatch(batch, [0, 1, 2], 1.0, CPU, Cut(token_multiple=8), share_in_segments, pack_segments)
    assert mb.shared is not None
    assert mb.local is None
    read = 30 + 9 + 4  # all three have 16 in common
    assert len(mb.input_ids) == 48
    assert mb.shared.source[read:].tolist() == [-1] * 5
    assert torch.equal(mb.input_ids[mb.shared.rows], mb.batch["input_ids"])
    packed: Any = mb.packed
    assert packed.own.queries[-1] == 48
    assert packed.children.stop == read, "padding continues nothing"


def test_other_microbatches_go_to_the_class_itself() -> None:
    class Plain(torch.nn.Module):
        def __init__(self, config: Any, layer_number: int, *, softmax_scale: float | None = None) -> None:
            super().__init__()

        def forward(self, query: Tensor, *_: Any, packed_seq_params: Any = None) -> Tensor:
            return query + 1

    attention = with_shared_prompts(Plain)(type("Config", (), {"kv_channels": 16}), layer_number=1)
    assert attention.segments_scale == 0.25
    query = torch.zeros(3, 4, 16)
    assert torch.equal(attention(query, query, query, None, packed_seq_params=None), query + 1)
    shared = share_in_segments(conversation_tree())
    packed: Any = pack_segments(conversation_tree().cu_seqlens, CPU, shared=shared)
    inputs = inputs_of(len(shared.source), 16)
    assert torch.equal(attention(*inputs, None, packed_seq_params=packed), attend(*inputs, packed, 0.25))


def test_a_second_derivative_is_refused() -> None:
    shared = share_in_segments(conversation_tree())
    packed: Any = pack_segments(conversation_tree().cu_seqlens, CPU, shared=shared)
    inputs = inputs_of(len(shared.source), 8)
    out = attend(*inputs, packed, 1.0)
    with pytest.raises(RuntimeError, match="attention over shared prompts has no second derivative"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("dim", [64, 128])
def test_torch_takes_the_calls(dim: int) -> None:
    flash_calls.run("meta", dim)
