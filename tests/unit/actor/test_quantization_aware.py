"""Training on rounded weights: passes see what servers hold, gradients go straight through, full weights step."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.algorithms import ALGORITHMS, algorithm_of
from megarl.families.weight_formats import FORMATS, ServedFormat
from megarl.ops.quantize import dequantise, new_pieces, quantise
from megarl.reshard.quantised_weights import QuantisedWeights
from megarl.types import PackedBatch, cu_seqlens_of
from tests.sglang.tiny_models import make_wide

pytestmark = pytest.mark.usefixtures("world_of_one")

LENGTHS = [9, 14, 7]
LR, EPS = 1e-2, 1e-3  # a large EPS: steps follow the gradients, and not the signs of those near 0


def rounded(weight: Tensor, format: ServedFormat) -> Tensor:
    pieces = new_pieces(weight, format)
    quantise(weight, format, pieces)
    return dequantise(format, pieces, weight.dtype)


class StraightThrough(torch.autograd.Function):
    """Rounds a weight; its gradient is that of the rounded one."""

    @staticmethod
    def forward(ctx: object, weight: Tensor, format: ServedFormat) -> Tensor:
        return rounded(weight, format)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def reference_logprobs(model: nn.Module, batch: PackedBatch, format: ServedFormat) -> Tensor:
    """Log-probs of each sequence's tokens after the first, by transformers on weights rounded with torch.autograd."""
    weights = {n: StraightThrough.apply(p, format) if format.quantises(n) else p for n, p in model.named_parameters()}
    found = []
    for ids in batch.tokens["input_ids"].split(LENGTHS):
        logits = functional_call(model, weights, (ids[None],)).logits[0].float()
        found.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(found)


def batch_of() -> PackedBatch:
    ids = torch.randint(2, 384, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    mask = torch.cat([torch.arange(n) > 0 for n in LENGTHS])
    return PackedBatch(cu_seqlens_of(torch.tensor(LENGTHS)), {"input_ids": ids, "loss_mask": mask}, {})


@pytest.fixture(params=FORMATS.values(), ids=lambda format: format.name)
def format(request: pytest.FixtureRequest) -> ServedFormat:
    found: ServedFormat = request.param
    return found


@pytest.fixture
def actor_of(tmp_path: Path) -> Callable[..., MegatronPPOActor]:
    def build(model: nn.Module, format: ServedFormat, dtype: str = "float32") -> MegatronPPOActor:
        model.save_pretrained(tmp_path / "model")
        optimizer = OptimizerConfig(lr=LR, adam_eps=EPS, clip_grad=0.0)
        config = EngineConfig(path=str(tmp_path / "model"), dtype=dtype, optimizer=optimizer)
        actor = MegatronPPOActor(config, algorithm_of(ALGORITHMS["grpo"][0]()))
        actor.initialize()
        actor.run_passes_in(QuantisedWeights(actor, format).rounded)
        return actor

    return build


def mean_loss(logprobs: Tensor, _: Tensor, data: PackedBatch) -> Tensor:
    return -logprobs[data["loss_mask"]].mean()


def values_of(actor: MegatronPPOActor) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in actor.named_weights()}


def test_passes_compute_with_the_rounded_weights_and_leave_the_full_ones(
    actor_of: Callable[..., MegatronPPOActor], format: ServedFormat
) -> None:
    model, batch = make_wide(5), batch_of()
    actor = actor_of(model, format)
    before = values_of(actor)
    found = actor.compute_logp(batch)[batch["loss_mask"]]
    with torch.no_grad():
        expected = reference_logprobs(model, batch, format)
        plain = copy.deepcopy(model)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.named_weights())
    assert float((found - full_logprobs(plain, batch)).abs().max()) > 1e-3, "rounding shows"


def full_logprobs(model: nn.Module, batch: PackedBatch) -> Tensor:
    with torch.no_grad():
        return torch.cat(
            [
                model(ids[None]).logits[0][:-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                for ids in batch.tokens["input_ids"].split(LENGTHS)
            ]
        )


def test_steps_are_those_of_a_straight_through_estimator(
    actor_of: Callable[..., MegatronPPOActor], format: ServedFormat
) -> None:
    """Three steps of Adam on the full weights, against torch.autograd and torch.optim."""
    model, batch = make_wide(6), batch_of()
    actor = actor_of(model, format)
    optimizer = torch.optim.Adam(model.parameters(), LR, betas=(0.9, 0.999), eps=EPS)
    for atol in (1e-5, 3e-3, 3e-3):  # after the first step, a weight near a tie rounds either way
        optimizer.zero_grad()
        loss = -reference_logprobs(model, batch, format).mean()
        loss.backward()
        optimizer.step()
        actor.train()
        stats = actor.train_batch(batch, mean_loss, lambda _: 1.0, "logprobs")
        assert stats["loss"] == pytest.approx(float(loss), rel=atol)
        trained = dict(actor.named_weights())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(trained[name], parameter.detach(), atol=atol, rtol=atol)


def test_a_sync_sends_what_the_passes_computed_with(
    actor_of: Callable[..., MegatronPPOActor], format: ServedFormat
) -> None:
    """In bfloat16 too: the pieces that are sent dequantise to the weights of a pass, to the bit."""
    actor = actor_of(make_wide(7), format, "bfloat16")
    source = QuantisedWeights(actor, format)
    sent = {shard.name: shard.view.clone() for shard in source.shards()}
    with source.rounded():
        computed = {s.name: s.view.clone() for s in actor.shards() if s.name.endswith("down_proj.weight")}
    assert len(computed) == 2
    for name, weight in computed.items():
        assert torch.equal(dequantise(format, [sent[n] for n in format.names(name)], torch.bfloat16), weight)


def test_a_pass_that_fails_leaves_the_full_weights(actor_of: Callable[..., MegatronPPOActor]) -> None:
    actor = actor_of(make_wide(8), FORMATS["fp8"])
    before = values_of(actor)
    with contextlib.suppress(ZeroDivisionError), QuantisedWeights(actor, FORMATS["fp8"]).rounded():
        assert any(not torch.equal(tensor, before[name]) for name, tensor in actor.named_weights())
        raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.named_weights())
