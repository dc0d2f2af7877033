"""The packed delta rule and convolution equal transformers' functions on each sequence alone, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from megarl.actor.batch.context_parallel import Cut, LocalTokens
from megarl.actor.model.attention.delta_rule import causal_convolution, gated_delta_rule, plan_recurrence, unit_length
from megarl.types import cu_seqlens_of

CPU = torch.device("cpu")
PACKS = ([5, 33, 2, 200, 64, 40, 65, 1], [3, 1, 2], [1], [63], [128, 64], [1, 130, 1])


def inputs(total: int, heads: int = 3, key_dim: int = 9, value_dim: int = 14) -> list[Tensor]:
    """Draws query, key, value, g and beta as a layer makes them, as leaves."""
    generator = torch.Generator().manual_seed(total)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    g = -drawn(total, heads).exp() * 0.3
    parts = [drawn(total, heads, key_dim), drawn(total, heads, key_dim), drawn(total, heads, value_dim), g]
    return [x.requires_grad_() for x in (*parts, torch.rand(total, heads, generator=generator))]


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_each_packed_sequence_has_the_outputs_and_gradients_of_transformers_alone(
    lengths: list[int], rule: str
) -> None:
    ours, theirs = inputs(sum(lengths)), inputs(sum(lengths))
    query, key, value, g, beta = ours
    plan = plan_recurrence(cu_seqlens_of(torch.tensor(lengths)), CPU)
    result = gated_delta_rule(unit_length(query), unit_length(key), value, g, beta, plan)
    expected = []
    for q, k, v, decay, strength in zip(*(x.split(lengths) for x in theirs), strict=True):
        output, _ = getattr(reference, rule)(
            q[None], k[None], v[None], g=decay[None], beta=strength[None], use_qk_l2norm_in_kernel=True
        )
        expected.append(output[0])
    torch.testing.assert_close(result, torch.cat(expected), rtol=0, atol=2e-6)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    (result * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_a_sequence_has_the_same_outputs_whatever_stands_beside_it() -> None:
    parts = inputs(70)
    alone = plan_recurrence(cu_seqlens_of(torch.tensor([70])), CPU)
    expected = gated_delta_rule(*parts, alone)
    others = inputs(21)
    packed = [torch.cat((b[:12], a, b[12:])) for a, b in zip(parts, others, strict=True)]
    plan = plan_recurrence(cu_seqlens_of(torch.tensor([12, 70, 9])), CPU)
    torch.testing.assert_close(gated_delta_rule(*packed, plan)[12:82], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [*PACKS, [2, 1, 7]], ids=str)
def test_the_convolution_is_that_of_each_sequence_alone(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(sum(lengths), 10, generator=generator), torch.randn(10, 4, generator=generator)
    positions = plan_recurrence(cu_seqlens_of(torch.tensor(lengths)), CPU).positions
    expected = [reference.causal_conv1d_fn(part.T[None], weight, activation="silu")[0].T for part in x.split(lengths)]
    torch.testing.assert_close(causal_convolution(x, weight, positions), torch.cat(expected), rtol=0, atol=2e-6)


def test_large_decays_give_finite_outputs_and_gradients() -> None:
    parts = inputs(150)
    plan = plan_recurrence(cu_seqlens_of(torch.tensor([140, 10])), CPU)
    query, key, value, g, beta = parts
    gated_delta_rule(unit_length(query), unit_length(key), value, g * 400, beta, plan).sum().backward()
    assert all(bool(x.grad is not None and x.grad.isfinite().all()) for x in parts)


def test_rows_of_a_cut_pack_come_into_order_and_back() -> None:
    cut = Cut(cp_rank=1, cp_size=2)
    bounds = cut.padded_cu_seqlens(cu_seqlens_of(torch.tensor([7, 3, 9])))
    plan = plan_recurrence(bounds, CPU, cut)
    assert plan.gather is not None
    assert plan.select is not None
    rows = torch.arange(int(bounds[-1]))
    assert torch.equal(rows[plan.gather][plan.select], rows)
    assert plan.positions.tolist() == [*range(8), *range(4), *range(12)]
    # Rank 0 holds chunks 0 and 3 of each sequence: tokens 0, 1, 6, 7 of the first.
    assert plan.gather[:8].tolist() == [0, 1, 12, 13, 14, 15, 2, 3]


def test_shared_prompts_are_repeated_for_each_sequence() -> None:
    # The second sequence repeats the first one's two tokens: they are read once.
    shared = LocalTokens(source=torch.tensor([0, 1, 2, 5]), rows=torch.tensor([0, 1, 2, 0, 1, 3]))
    plan = plan_recurrence(cu_seqlens_of(torch.tensor([3, 3])), CPU, shared=shared)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert plan.gather is not None
    assert plan.select is not None
    assert torch.equal(x[plan.gather][plan.select], x)
