"""Labels, positions, segments and rows, whole and cut for context parallelism."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.ops import reference
from megarl.ops.index import build_index
from megarl.types import cu_seqlens_of


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]), st.booleans(), st.integers(0, 9)
)
def test_the_ranks_together_hold_what_one_rank_would(chunks, cp_size, masked, seed):
    lengths = [c * 2 * cp_size for c in chunks] if cp_size > 1 else chunks
    cu = cu_seqlens_of(torch.tensor(lengths, dtype=torch.int64))
    total = int(cu[-1])
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 100, (total,), generator=generator)
    mask = torch.rand(total, generator=generator) < 0.5 if masked else None
    whole = build_index(tokens, cu, mask)
    seen = torch.zeros(total, dtype=torch.int64)
    for rank in range(cp_size):
        got = build_index(tokens, cu, mask, cp_rank=rank, cp_size=cp_size)
        want = reference.build_index(tokens, cu, mask, cp_rank=rank, cp_size=cp_size)
        for name in got._fields:
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert torch.equal(got.labels, whole.labels[got.positions])
        assert torch.equal(got.segments, whole.segments[got.positions])
        seen[got.positions] += 1
    assert (seen == 1).all()


def test_a_row_is_labelled_with_the_next_token_of_its_own_sequence():
    tokens = torch.tensor([10, 11, 12, 20, 30, 31])
    cu = torch.tensor([0, 3, 4, 4, 6], dtype=torch.int32)
    index = build_index(tokens, cu)
    assert index.labels.tolist() == [11, 12, -1, -1, 31, -1]
    assert index.segments.tolist() == [0, 0, 0, 1, 3, 3]
    assert index.rows[: int(index.row_count)].tolist() == [0, 1, 4]
    only_last = build_index(tokens, cu, torch.tensor([0, 0, 1, 1, 0, 0]).bool())
    assert only_last.labels.tolist() == [-1, 12, -1, -1, -1, -1]


@pytest.mark.parametrize("lengths", [[], [0], [1], [1, 1, 0, 1]])
def test_batches_without_a_second_token_have_no_labels(lengths):
    cu = cu_seqlens_of(torch.tensor(lengths, dtype=torch.int64))
    index = build_index(torch.arange(sum(lengths)), cu)
    assert (index.labels == -1).all()
    assert (index.rows == -1).all()
    assert int(index.row_count) == 0
