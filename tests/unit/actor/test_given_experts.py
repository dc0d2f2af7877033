"""Routers take given experts in each pass, keep them for its recomputation, and count what they would have chosen.

Layouts are in `tests/distributed/test_replayed_experts.py`, routes of real servers in `tests/sglang`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.actor.policy import MegatronPPOActor
from megarl.knobs import UserError
from megarl.types import ROUTED_EXPERTS, PackedBatch, cu_seqlens_of
from tests.distributed.layout_worker import gather_gradients, loss_fn, loss_weight_fn
from tests.sglang.replay_worker import actor_of, chosen, copy_of, trained_on

pytestmark = pytest.mark.usefixtures("world_of_one")

LENGTHS = torch.tensor([20, 7, 33, 12])
EXPERTS, TOPK, LAYERS = 8, 3, 2  # of layers with experts: the middle one has none
SMALL = {"max_tokens_per_mb": 40}  # three microbatches


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints(
        "qwen3_moe", tied=False, num_hidden_layers=3, num_experts=EXPERTS, num_experts_per_tok=TOPK, mlp_only_layers=[1]
    )


def batch_of(seed: int = 0) -> PackedBatch:
    """Sequences whose experts are drawn at random; the last token of each has none."""
    generator = torch.Generator().manual_seed(seed)
    total, bounds = int(LENGTHS.sum()), cu_seqlens_of(LENGTHS)
    mask = torch.ones(total, dtype=torch.bool).index_fill(0, bounds[:-1].long(), False)
    order = torch.rand(total, LAYERS, EXPERTS, generator=generator).argsort(-1)
    routes = order[..., :TOPK].to(torch.int16).index_fill(0, bounds[1:].long() - 1, -1)
    tokens = {
        "input_ids": torch.randint(0, 343, (total,), generator=generator),
        "loss_mask": mask,
        "advantages": torch.randn(total, generator=generator),
        "rollout_logprobs": torch.full((total,), -5.0) * mask,
        ROUTED_EXPERTS: routes,
    }
    sequences = {"rewards": torch.tensor([1.0, 0.0, 0.5, 0.0]), "group_ids": torch.tensor([0, 0, 1, 1])}
    return PackedBatch(bounds, tokens, sequences)


def routers_of(actor: MegatronPPOActor) -> Iterator[Any]:
    assert actor._replay is not None
    yield from actor._replay.routers.values()


def gradients_of(actor: MegatronPPOActor, batch: PackedBatch) -> dict[str, Tensor]:
    actor.train()
    actor.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")
    assert not any(router.waiting for router in routers_of(actor))
    return gather_gradients(actor)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    """Gradients without recomputation."""
    return gradients_of(actor_of(folder, **SMALL), batch_of())


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()), msg=name)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_recomputation_takes_the_experts_of_its_forward_pass(
    folder: Path, recompute: str, expected: dict[str, Tensor]
) -> None:
    check_gradients(gradients_of(actor_of(folder, recompute=recompute, **SMALL), batch_of()), expected)


def test_a_pass_that_failed_leaves_no_experts_for_the_next(folder: Path, expected: dict[str, Tensor]) -> None:
    actor = actor_of(folder, recompute="full", **SMALL)

    def failing(*_: Any) -> Any:
        raise ZeroDivisionError

    actor.train()
    with pytest.raises(ZeroDivisionError):
        actor.train_batch(batch_of(seed=1), failing, loss_weight_fn, loss_input="logprobs")
    check_gradients(gradients_of(actor, batch_of()), expected)


def test_a_pass_without_backward_keeps_no_experts(folder: Path) -> None:
    actor = actor_of(folder, recompute="full", **SMALL)
    actor.eval().logprobs(batch_of())
    assert not any(router.waiting for router in routers_of(actor))


def test_given_experts_are_taken_and_the_others_are_the_routers_own(folder: Path) -> None:
    actor, batch = actor_of(folder, **SMALL), batch_of()
    given = batch[ROUTED_EXPERTS].sort(-1).values
    routed = given[..., 0] >= 0
    assert bool((batch[ROUTED_EXPERTS][:, :, 0] == 0).any())  # no expert stands for "none"
    found = chosen(actor, batch)
    assert torch.equal(found[routed], given[routed])
    assert bool((found[~routed] >= 0).all())
    own = copy_of(batch, without=ROUTED_EXPERTS)
    own.set_tokens(ROUTED_EXPERTS, chosen(actor, own))
    torch.testing.assert_close(
        actor.logprobs(own), actor.logprobs(copy_of(own, without=ROUTED_EXPERTS)), atol=1e-6, rtol=0
    )


def test_the_share_of_changed_choices_is_of_choices_and_not_of_their_order(folder: Path) -> None:
    actor, batch = actor_of(folder, **SMALL), batch_of()
    own = chosen(actor, copy_of(batch, without=ROUTED_EXPERTS))
    assert actor._replay is not None
    batch[ROUTED_EXPERTS][:] = own.flip(-1)
    actor.logprobs(batch)
    assert actor._replay.changed_share() == 0.0
    absent = int(next(expert for expert in range(EXPERTS) if expert not in own[5, 0]))
    batch[ROUTED_EXPERTS][5, 0, 1] = absent  # in the first layer, so that later tokens and layers may choose otherwise
    replayed = int((batch[ROUTED_EXPERTS][..., 0] >= 0).sum())
    actor.logprobs(batch)
    assert 1 / replayed <= actor._replay.changed_share() < 0.5
    assert actor._replay.changed_share() == 0.0  # of the passes since the last call


def test_proximal_replay_takes_the_place_of_routes_that_a_batch_has(folder: Path) -> None:
    actor, batch = actor_of(folder, "proximal", **SMALL), batch_of()
    own = chosen(actor, copy_of(batch, without=ROUTED_EXPERTS))
    batch["prox_logp"] = actor.compute_logp(batch)
    assert torch.equal(batch[ROUTED_EXPERTS].sort(-1).values, own)
    update = actor.ppo_update(trained_on(actor, batch))
    assert update["routes_changed"] < 0.5


def test_an_update_without_routes_is_refused(folder: Path) -> None:
    actor = actor_of(folder, **SMALL)
    batch = trained_on(actor, batch_of())
    with pytest.raises(UserError, match="the workflow lost them"):
        actor.ppo_update(copy_of(batch, without=ROUTED_EXPERTS))


@pytest.mark.parametrize(
    ("token", "layer", "expert", "message"),
    [
        (22, 1, -1, "sequence 1 of the batch has no route for token 2 of 7, and 1 of 4 sequences lack some"),
        (58, 0, EXPERTS, "sequence 2 of the batch has no route for token 31 of 33"),  # the model lacks this expert
        (59, 0, -1, ""),  # nothing was sampled behind it
        (24, 0, -1, ""),  # behind the last trained token
        (23, 0, -1, "sequence 1 of the batch has no route for token 3 of 7"),
    ],
)
def test_tokens_before_a_trained_one_need_a_route_in_every_layer(
    folder: Path, token: int, layer: int, expert: int, message: str
) -> None:
    actor, batch = actor_of(folder, **SMALL), batch_of()
    batch["loss_mask"][25:27] = False  # the last trained token of sequence 1 is 24
    batch[ROUTED_EXPERTS][token, layer] = expert
    assert actor._replay is not None
    if not message:
        actor._replay.check(batch)
        return
    with pytest.raises(UserError, match=message):
        actor._replay.check(batch)


@pytest.mark.parametrize("layers", [1, 3])
def test_routes_of_a_model_with_other_layers_are_refused(folder: Path, layers: int) -> None:
    actor, batch = actor_of(folder, **SMALL), batch_of()
    batch.set_tokens(ROUTED_EXPERTS, batch[ROUTED_EXPERTS][:, :1].repeat(1, layers, 1))
    with pytest.raises(UserError, match=rf"of shape \[72, {layers}, 3\], and the model routes in 2 layers"):
        actor.compute_logp(batch)


def test_a_prompt_is_read_once_only_where_its_routes_agree(folder: Path) -> None:
    actor = actor_of(folder, shared_prefix=True, max_tokens_per_mb=200)
    ids, bounds = torch.arange(5, 29).repeat(2), torch.tensor([0, 24, 48], dtype=torch.int32)
    routes = batch_of()[ROUTED_EXPERTS][20:44].abs()  # none is missing
    batch = PackedBatch(
        bounds, {"input_ids": ids, ROUTED_EXPERTS: routes.repeat(2, 1, 1)}, {"group_ids": torch.zeros(2).long()}
    )

    def read() -> int:
        return sum(mb.input_ids.numel() for mb in actor._microbatches(batch))

    assert read() < 48
    batch[ROUTED_EXPERTS][0, 0] = (batch[ROUTED_EXPERTS][24, 0] + 1) % EXPERTS
    assert read() == 48
