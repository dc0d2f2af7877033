"""Losses, gradients and advantages against TRL's code on the same log-probs; `record_trl.py` recorded TRL's results.

Differences of definitions:
- TRL adds 1e-4 to every standard deviation: `advantage_eps=1e-4`. It also does so for GDPO over the batch; megarl does
  not.
- TRL's `epsilon_high` of CISPO is the largest weight, megarl's is the distance from 1: 1.3 is `clip_high=0.3`.
- TRL's RLOO uses the ratio of the whole completion and the mean over completions. In the first step on a batch its
  gradient equals megarl's summed over tokens (`aggregate=constant` with 1 token).
- Some of TRL's losses have another value with the same gradient (log pi, or a ratio of 1). Then only gradients are
  compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import ALGORITHMS, algorithm_of
from megarl.types import PackedBatch, cu_seqlens_of

FIGURES: dict[str, Any] = json.loads(Path(__file__).with_name("trl_figures.json").read_text())
LENGTHS = torch.tensor(FIGURES["lengths"])


def tokens(values: list[float]) -> Tensor:
    """Puts a 0 for the one prompt token before the values of each completion's tokens."""
    return torch.cat([torch.cat([torch.zeros(1), part]) for part in torch.tensor(values).split(LENGTHS.tolist())])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def make_batch() -> PackedBatch:
    recorded = {name: tokens(values) for name, values in FIGURES["inputs"].items()}
    mask = tokens([1.0] * int(LENGTHS.sum())).bool()
    advantages = torch.tensor(FIGURES["advantages"]).repeat_interleave(LENGTHS + 1) * mask
    count = len(LENGTHS)
    return PackedBatch(
        cu_seqlens_of(LENGTHS + 1),
        {
            "loss_mask": mask,
            "prox_logp": recorded["old"],
            "ref_logp": recorded["ref"],
            "logprobs": recorded["logprobs"],
            "advantages": advantages,
        },
        {
            "rewards": torch.tensor(FIGURES["rewards"])[:, 0].contiguous(),
            "reward_columns": torch.tensor(FIGURES["rewards"]),
            "group_ids": torch.arange(count) // 4,
            "is_chosen": torch.arange(count) % 2 == 0,
            "pair_ids": torch.arange(count) // 2,
            "kto_label": torch.arange(count) % 2 == 0,
            "kto_kl": torch.full((count,), 0.7),
            "kto_desirable_share": torch.full((count,), 0.5),
        },
    )


def ours(name: str, knobs: dict[str, Any], batch: PackedBatch) -> tuple[float, Tensor]:
    """Computes the loss and its gradient at the trained tokens."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    algorithm = algorithm_of(ALGORITHMS[name][0](**knobs))
    loss, _ = algorithm.loss(logprobs, torch.zeros_like(logprobs), batch)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad[batch["loss_mask"]]


LOSSES: list[tuple[str, str, dict[str, Any]]] = [
    ("grpo", "grpo", {"aggregate": "sequence"}),
    ("grpo_kl", "grpo", {"aggregate": "sequence", "kl_coef": 0.1}),
    ("bnpo", "grpo", {"aggregate": "token"}),
    ("dr_grpo", "dr_grpo", {"aggregate_tokens": 12}),
    ("dapo", "dapo", {}),
    ("gspo", "gspo", {"clip_low": 0.03, "clip_high": 0.04}),
]


@pytest.mark.parametrize(("trl", "name", "knobs"), LOSSES, ids=[case[0] for case in LOSSES])
def test_policy_losses_and_gradients_match_trl(trl: str, name: str, knobs: dict[str, Any]) -> None:
    loss, gradient = ours(name, knobs, make_batch())
    assert loss == pytest.approx(FIGURES["losses"][trl]["loss"], rel=1e-5, abs=1e-6)
    assert_close(gradient, torch.tensor(FIGURES["losses"][trl]["gradient"]))


def test_cispo_has_trls_gradient() -> None:
    _, gradient = ours("cispo", {"clip_high": 0.3}, make_batch())
    assert_close(gradient, torch.tensor(FIGURES["losses"]["cispo"]["gradient"]))


@pytest.mark.parametrize("name", ["rloo", "reinforce"])
def test_rloo_has_trls_gradient_in_the_first_step_on_a_batch(name: str) -> None:
    batch = make_batch()
    batch["prox_logp"] = batch["logprobs"].clone()
    _, gradient = ours(name, {"aggregate": "constant", "aggregate_tokens": 1}, batch)
    assert_close(gradient, torch.tensor(FIGURES["losses"]["rloo"]["gradient"]))


PREFERENCES: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {}),
    ("ipo", {}),
    ("kto", {"desirable_weight": 1.2, "undesirable_weight": 0.8}),
    ("orpo", {}),
    ("simpo", {}),
]


@pytest.mark.parametrize(("name", "knobs"), PREFERENCES, ids=[case[0] for case in PREFERENCES])
def test_losses_on_preferences_and_their_gradients_match_trl(name: str, knobs: dict[str, Any]) -> None:
    loss, gradient = ours(name, knobs, make_batch())
    assert loss == pytest.approx(FIGURES["preferences"][name]["loss"], rel=1e-5, abs=1e-6)
    assert_close(gradient, torch.tensor(FIGURES["preferences"][name]["gradient"]))


def advantages(name: str, knobs: dict[str, Any]) -> Tensor:
    """Computes one advantage per completion."""
    batch = make_batch()
    per_token = algorithm_of(ALGORITHMS[name][0](**knobs)).advantages(batch)
    return per_token[batch.cu_seqlens[1:].long() - 1]


@pytest.mark.parametrize(("name", "knobs"), [("grpo", {"advantage_eps": 1e-4}), ("dr_grpo", {"aggregate_tokens": 12})])
def test_advantages_match_trl(name: str, knobs: dict[str, Any]) -> None:
    theirs = torch.tensor(FIGURES["advantages_of"][name]["advantages"])
    assert_close(advantages(name, knobs), theirs)


def test_rloo_advantages_match_trl() -> None:
    theirs = torch.tensor(FIGURES["advantages_of"]["rloo"]["advantages"])
    assert_close(advantages("rloo", {}), theirs)


def test_gdpo_normalises_each_reward_and_sums_as_trl_does() -> None:
    theirs = FIGURES["advantages_of"]["gdpo"]
    summed = advantages("gdpo", {"advantage_eps": 1e-4, "normalize_batch": False})
    assert_close(summed, torch.tensor(theirs["rewards"]))
    over_batch = advantages("gdpo", {"advantage_eps": 1e-4})
    width = float(summed.std())
    assert_close(over_batch * width / (width + 1e-4), torch.tensor(theirs["advantages"]))


def test_the_recorded_results_have_clipped_and_unclipped_tokens() -> None:
    """Some gradients are 0 and others are not, so both branches of the clip were compared."""
    for name in ("grpo", "dapo", "gspo"):
        zero = torch.tensor(FIGURES["losses"][name]["gradient"]) == 0
        assert 0 < zero.sum() < len(zero), name
