"""Cuts of microbatches: each token on one rank, zigzag order, and attention equal to that of full sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from megarl.actor.batch.context_parallel import (
    Cut,
    _GatherSlicingGradient,
    _GatherSummingGradients,
    local_tokens,
)
from megarl.actor.model.attention.packed import pack_in_blocks
from megarl.types import cu_seqlens_of

CPU = torch.device("cpu")
lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@settings(deadline=None)
@given(lengths_lists, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]))
def test_every_token_is_on_one_rank_and_comes_back_in_place(lengths: list[int], cp: int, multiple: int) -> None:
    cu_seqlens = cu_seqlens_of(torch.tensor(lengths))
    values = torch.arange(1, sum(lengths) + 1)
    cuts = [Cut(rank, cp, multiple) for rank in range(cp)]
    padded = cuts[0].padded_cu_seqlens(cu_seqlens)
    locals_ = [local_tokens(cu_seqlens, padded, cut) for cut in cuts]
    parts = [local.take(values, 0) for local in locals_]
    assert len({part.numel() for part in parts}) == 1
    assert parts[0].numel() % multiple == 0
    joined = torch.cat(parts)
    assert all(torch.equal(joined[local.rows], values) for local in locals_)
    assert sorted(joined[joined > 0].tolist()) == values.tolist()


@pytest.mark.parametrize("cp", [2, 4])
def test_a_rank_holds_chunk_r_and_its_mirror_image(cp: int) -> None:
    cu_seqlens = cu_seqlens_of(torch.tensor([16, 8, 24]))
    for rank in range(cp):
        source, positions = [], []
        for start, stop in itertools.pairwise(cu_seqlens.tolist()):
            chunks = torch.arange(stop - start).chunk(2 * cp)
            positions += [chunks[rank], chunks[2 * cp - 1 - rank]]
            source += [start + positions[-2], start + positions[-1]]
        assert torch.equal(local_tokens(cu_seqlens, cu_seqlens, Cut(rank, cp)).source, torch.cat(source))
        assert torch.equal(pack_in_blocks(cu_seqlens, CPU, Cut(rank, cp)).positions, torch.cat(positions))


@settings(deadline=None, max_examples=25)
@given(lengths_lists, st.sampled_from([2, 3]))
def test_a_rank_s_attention_is_its_part_of_the_whole(lengths: list[int], cp: int) -> None:
    cu_seqlens = cu_seqlens_of(torch.tensor(lengths))
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(3))
    expected = torch.cat(
        [
            scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=True).transpose(0, 1)
            for part in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ]
    )
    cuts = [Cut(rank, cp) for rank in range(cp)]
    padded = cuts[0].padded_cu_seqlens(cu_seqlens)
    tokens = [local_tokens(cu_seqlens, padded, cut) for cut in cuts]

    def part(x: torch.Tensor, rank: int) -> torch.Tensor:
        return x[tokens[rank].source.clamp(min=0)] * (tokens[rank].source >= 0)[:, None, None]

    keys, values = (torch.cat([part(x, rank) for rank in range(cp)]) for x in (key, value))
    outputs = []
    for rank in range(cp):
        plan, local_query = pack_in_blocks(padded, CPU, cuts[rank]), part(query, rank)
        block_outputs = []
        for block in plan.blocks:
            shape = (block.num_seqs, -1, 2, 8)
            q = local_query[block.queries].view(shape).transpose(1, 2)
            k, v = (x[block.keys].view(shape).transpose(1, 2) for x in (keys, values))
            out = scaled_dot_product_attention(q, k, v, attn_mask=block.mask).transpose(1, 2)
            block_outputs.append(out.reshape(-1, 2, 8)[block.valid])
        outputs.append(torch.cat(block_outputs)[plan.restore])
    torch.testing.assert_close(torch.cat(outputs)[tokens[0].rows], expected)


def test_every_rank_s_attention_costs_the_same() -> None:
    cu_seqlens = cu_seqlens_of(torch.tensor([64, 32]))
    plans = [pack_in_blocks(cu_seqlens, CPU, Cut(rank, 4)) for rank in range(4)]
    assert len({sum(int(block.mask.sum()) for block in plan.blocks) for plan in plans if plan}) == 1


@pytest.fixture
def lone_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("gather", [_GatherSlicingGradient, _GatherSummingGradients])
def test_gathers_have_a_first_derivative_and_refuse_a_second(
    gather: type[torch.autograd.Function], lone_group: dist.ProcessGroup
) -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(gather.apply(rows, lone_group).square().sum(), rows)
    assert torch.equal(grad, 2 * rows)
    with pytest.raises(RuntimeError, match=r"^context parallelism has no second derivative, .*parallel\.cp_size=1$"):
        torch.autograd.grad(gather.apply(rows, lone_group).square().sum(), rows, create_graph=True)
