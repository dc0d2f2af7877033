"""Parts of GRPO by hand; tests/unit/actor/test_engine.py compares its gradient with plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms import GRPO, GRPOConfig
from megarl.types import PackedBatch


def batch_of(rewards: list[float], groups: list[int]) -> PackedBatch:
    """Builds sequences of one prompt token and two trained tokens."""
    count = len(rewards)
    return PackedBatch(
        torch.arange(0, 3 * count + 1, 3),
        {"loss_mask": torch.tensor([False, True, True] * count), "prox_logp": torch.zeros(3 * count)},
        {"rewards": torch.tensor(rewards), "group_ids": torch.tensor(groups)},
    )


def test_advantages_are_relative_to_the_group_and_zero_on_the_prompt() -> None:
    grpo = GRPO(GRPOConfig(advantage_eps=0.0))
    advantages = grpo.advantages(batch_of([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])).view(4, 3)
    half = math.sqrt(0.5)
    assert advantages[:, 0].tolist() == [0.0] * 4
    assert advantages[0, 1:].tolist() == pytest.approx([half, half])
    assert advantages[1, 1:].tolist() == pytest.approx([-half, -half])


def test_equal_rewards_in_a_group_give_no_advantage() -> None:
    assert GRPO(GRPOConfig()).advantages(batch_of([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1])).abs().max() == 0.0


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient_flows"),
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False), (0.1, 1.0, True)],
)
def test_the_clip_stops_the_gradient_of_tokens_outside_the_bounds(
    log_ratio: float, advantage: float, gradient_flows: bool
) -> None:
    data = batch_of([0.0], [0])
    data["advantages"] = torch.tensor([0.0, advantage, advantage])
    logprobs = torch.full((3,), log_ratio, requires_grad=True)
    loss, metrics = GRPO(GRPOConfig(eps_clip=0.2)).loss(logprobs, torch.ones(3), data)
    loss.backward()
    assert (logprobs.grad[1:].abs() > 0).all().item() is gradient_flows
    assert logprobs.grad[0] == 0.0
    assert metrics["clip_fraction"] == ((0.0 if gradient_flows else 1.0), 2.0)
    assert float(metrics["ratio_max"]) == pytest.approx(math.exp(log_ratio))
