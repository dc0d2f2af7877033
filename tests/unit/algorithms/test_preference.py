"""Every offline method against its paper's formula, computed pair by pair in double precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import ALGORITHMS, algorithm_of
from megarl.algorithms.kto import mismatched_kl
from megarl.algorithms.orpo import log1mexp
from megarl.algorithms.reward_model import RewardModel, RewardModelConfig
from megarl.knobs import UserError
from megarl.types import PackedBatch, cu_seqlens_of

LENGTHS = [5, 7, 4, 6, 9, 3]
PROMPTS = [2, 2, 1, 1, 2, 2]


def make_batch(seed: int = 0) -> PackedBatch:
    """Builds three pairs, which are also six labelled completions."""
    g = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    return PackedBatch(
        cu_seqlens_of(torch.tensor(LENGTHS)),
        {
            "loss_mask": torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPTS, strict=True)]),
            "ref_logp": -1.0 + 0.4 * torch.randn(total, generator=g),
            "logprobs": -1.0 + 0.4 * torch.randn(total, generator=g),
        },
        {
            "is_chosen": torch.tensor([True, False] * 3),
            "pair_ids": torch.tensor([0, 0, 1, 1, 2, 2]),
            "kto_label": torch.tensor([True, False, False, True, True, False]),
            "kto_kl": torch.full((6,), 0.7),
            "kto_desirable_share": torch.full((6,), 0.5),
        },
    )


def sums(values: Tensor, batch: PackedBatch) -> list[Tensor]:
    pairs = zip(values.double().split(LENGTHS), batch["loss_mask"].split(LENGTHS), strict=True)
    return [part[mask].sum() for part, mask in pairs]


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def expected_loss(name: str, logprobs: Tensor, batch: PackedBatch, config: Any) -> Tensor:
    logp, ref = sums(logprobs, batch), sums(batch["ref_logp"], batch)
    sizes = [n - p for n, p in zip(LENGTHS, PROMPTS, strict=True)]
    h = [a - b for a, b in zip(logp, ref, strict=True)]
    losses = []
    if name == "kto":
        for i, good in enumerate(batch["kto_label"].tolist()):
            inner = torch.sigmoid(config.beta * (h[i] - 0.7 if good else 0.7 - h[i]))
            losses.append((config.desirable_weight if good else config.undesirable_weight) * (1 - inner))
        return torch.stack(losses).mean()
    for w, r in ((0, 1), (2, 3), (4, 5)):
        mean_w, mean_l = logp[w] / sizes[w], logp[r] / sizes[r]
        if name == "dpo":
            margin, e = config.beta * (h[w] - h[r]), config.label_smoothing
            losses.append(-(1 - e) * log_sigmoid(margin) - e * log_sigmoid(-margin))
        elif name == "ipo":
            scale = sizes if config.length_average else [1] * 6
            losses.append((h[w] / scale[w] - h[r] / scale[r] - 1 / (2 * config.beta)) ** 2)
        elif name == "orpo":
            odds_w, odds_l = (torch.log(m.exp() / (1 - m.exp())) for m in (mean_w, mean_l))
            losses.append(-mean_w - config.alpha * log_sigmoid(odds_w - odds_l))
        else:
            margin, e = config.beta * mean_w - config.beta * mean_l - config.gamma, config.label_smoothing
            losses.append(-(1 - e) * log_sigmoid(margin) - e * log_sigmoid(-margin) - config.cpo_alpha * mean_w)
    return torch.stack(losses).mean()


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.1}),
    ("ipo", {}),
    ("ipo", {"length_average": False}),
    ("kto", {}),
    ("kto", {"beta": 0.5, "desirable_weight": 1.33, "undesirable_weight": 0.5}),
    ("orpo", {}),
    ("orpo", {"alpha": 1.0}),
    ("simpo", {}),
    ("simpo", {"beta": 10.0, "gamma": 1.6, "cpo_alpha": 0.5, "label_smoothing": 0.2}),
]


@pytest.mark.parametrize(("name", "knobs"), VARIANTS, ids=[f"{n}-{'-'.join(k) or 'defaults'}" for n, k in VARIANTS])
def test_loss_and_gradient_match_the_paper(name: str, knobs: dict[str, Any]) -> None:
    config = ALGORITHMS[name][0](**knobs)  # type: ignore[call-arg]
    config.check()
    algorithm, batch = algorithm_of(config), make_batch()
    ours, theirs = batch["logprobs"].clone().requires_grad_(), batch["logprobs"].clone().requires_grad_()
    loss, metrics = algorithm.loss(ours, torch.zeros_like(ours), batch)
    expected = expected_loss(name, theirs, batch, config)
    loss.backward()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert ours.grad[~batch["loss_mask"]].abs().max() == 0
    assert all(math.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "simpo"])
def test_metrics_are_of_the_methods_rewards(name: str) -> None:
    config = ALGORITHMS[name][0]()
    batch = make_batch()
    _, metrics = algorithm_of(config).loss(batch["logprobs"], torch.zeros_like(batch["logprobs"]), batch)
    sizes = [n - p for n, p in zip(LENGTHS, PROMPTS, strict=True)]
    logp, ref = sums(batch["logprobs"], batch), sums(batch["ref_logp"], batch)
    scale = config.alpha if name == "orpo" else config.beta  # type: ignore[attr-defined]
    rewards = [
        float(scale * (a - (b if name in ("dpo", "ipo") else 0)) / (1 if name == "dpo" else size))
        for a, b, size in zip(logp, ref, sizes, strict=True)
    ]
    chosen, rejected = rewards[0::2], rewards[1::2]
    expected = {
        "reward_chosen": sum(chosen) / 3,
        "reward_rejected": sum(rejected) / 3,
        "margin": (sum(chosen) - sum(rejected)) / 3,
        "accuracy": sum(a > b for a, b in zip(chosen, rejected, strict=True)) / 3,
    }
    assert {key: float(metrics[key]) for key in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_parts(name: str) -> None:
    algorithm, batch = algorithm_of(ALGORITHMS[name][0]()), make_batch()
    whole, _ = algorithm.loss(batch["logprobs"], batch["logprobs"], batch)
    parts = [batch.select([0, 1, 4, 5]), batch.select([2, 3])]
    losses = [algorithm.loss(part["logprobs"], part["logprobs"], part)[0] for part in parts]
    weights = [float(algorithm.loss_weight(part)) for part in parts]
    joined = sum(w * float(loss) for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert joined == pytest.approx(float(whole), rel=1e-5)


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "simpo"])
def test_the_gradient_raises_the_chosen_and_lowers_the_rejected(name: str) -> None:
    algorithm, batch = algorithm_of(ALGORITHMS[name][0]()), make_batch()
    logprobs = batch["ref_logp"].clone().requires_grad_()
    algorithm.loss(logprobs, logprobs, batch)[0].backward()
    for sequence, (grad, mask) in enumerate(
        zip(logprobs.grad.split(LENGTHS), batch["loss_mask"].split(LENGTHS), strict=True)
    ):
        assert (grad[mask] < 0).all() if sequence % 2 == 0 else (grad[mask] > 0).all()


def test_a_policy_equal_to_its_reference_starts_at_log_2() -> None:
    batch = make_batch()
    loss, metrics = algorithm_of(ALGORITHMS["dpo"][0]()).loss(batch["ref_logp"], batch["ref_logp"], batch)
    assert float(loss) == pytest.approx(math.log(2))
    assert float(metrics["margin"]) == 0.0


def test_a_completion_at_the_kl_of_kto_is_not_on_the_desirable_side() -> None:
    batch = make_batch()
    batch["kto_label"] = torch.tensor([True, True, True, True, False, False])
    batch["kto_kl"] = torch.zeros(6)
    _, metrics = algorithm_of(ALGORITHMS["kto"][0]()).loss(batch["ref_logp"], batch["ref_logp"], batch)
    assert float(metrics["accuracy"]) == pytest.approx(2 / 6)


def test_simpo_tells_the_negative_log_likelihood_that_its_loss_has() -> None:
    batch, config = make_batch(), ALGORITHMS["simpo"][0](cpo_alpha=0.5)  # type: ignore[call-arg]
    _, metrics = algorithm_of(config).loss(batch["logprobs"], torch.zeros_like(batch["logprobs"]), batch)
    sizes = [n - p for n, p in zip(LENGTHS, PROMPTS, strict=True)]
    means = [float(a) / size for a, size in zip(sums(batch["logprobs"], batch), sizes, strict=True)]
    assert float(metrics["nll"]) == pytest.approx(-sum(means[0::2]) / 3, rel=1e-5)


@pytest.mark.parametrize("name", ["dpo", "kto"])
@pytest.mark.parametrize("cut", [[[0, 1], [2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]]])
def test_metrics_do_not_depend_on_the_microbatches(name: str, cut: list[list[int]]) -> None:
    """The engine weights a microbatch's metrics by `loss_weight`. For KTO it may have completions of one label only."""
    batch, algorithm = make_batch(), algorithm_of(ALGORITHMS[name][0]())
    batch["kto_label"] = torch.tensor([True, True, False, True, False, False])
    _, whole = algorithm.loss(batch["logprobs"], torch.zeros_like(batch["logprobs"]), batch)
    parts = [batch.select(indices) for indices in cut]
    joined = dict.fromkeys(whole, 0.0)
    for part in parts:
        _, metrics = algorithm.loss(part["logprobs"], torch.zeros_like(part["logprobs"]), part)
        share = float(algorithm.loss_weight(part) / algorithm.loss_weight(batch))
        joined = {key: total + share * float(metrics[key]) for key, total in joined.items()}
    assert joined == pytest.approx({key: float(value) for key, value in whole.items()}, rel=1e-5)
    if name == "kto":
        h = [float(a - b) for a, b in zip(sums(batch["logprobs"], batch), sums(batch["ref_logp"], batch), strict=True)]
        good, bad = (h[0] + h[1] + h[3]) / 3, (h[2] + h[4] + h[5]) / 3
        assert joined["margin"] == pytest.approx(0.1 * (good - bad), rel=1e-5)


def test_the_kl_of_kto_is_never_negative() -> None:
    batch = make_batch()
    h = torch.stack(sums(batch["logprobs"] - batch["ref_logp"], batch)).mean()
    assert mismatched_kl(batch["logprobs"], batch["ref_logp"], batch) == pytest.approx(max(0.0, float(h)), rel=1e-5)
    assert mismatched_kl(batch["ref_logp"] - 1, batch["ref_logp"], batch) == 0.0


@pytest.mark.parametrize("x", [-1e-9, -1e-4, -0.5, -0.6931, -0.7, -5.0, -80.0])
def test_log1mexp_is_exact_near_and_far_from_zero(x: float) -> None:
    value = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    out = log1mexp(value)
    out.backward()
    clamped = min(x, -1e-6)
    assert float(out) == pytest.approx(math.log(-math.expm1(clamped)), rel=1e-9, abs=1e-30)
    assert value.grad is not None
    assert math.isfinite(float(value.grad))


def test_a_reward_model_scores_the_last_token() -> None:
    batch = make_batch()
    values = torch.zeros(sum(LENGTHS))
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    values[ends] = torch.tensor([2.0, 1.0, 0.0, 1.0, 3.0, 3.0])
    values.requires_grad_()
    model = RewardModel(RewardModelConfig(center_coef=0.01))
    loss, metrics = model.loss(values, batch)
    margins = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    expected = -log_sigmoid(margins).mean() + 0.01 * (9 + 1 + 36) / 3
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(metrics["accuracy"]) == pytest.approx(1 / 2)  # one pair in order, one not, and a tie
    assert float(metrics["reward_chosen"]) == pytest.approx(5 / 3)
    assert float(metrics["reward_rejected"]) == pytest.approx(5 / 3)
    values.data[ends[0]] += 3.0
    _, metrics = model.loss(values, batch)
    assert float(metrics["reward_chosen"]) == pytest.approx(8 / 3)
    assert float(metrics["margin"]) == pytest.approx(1.0)
    assert float(metrics["accuracy"]) == pytest.approx(1 / 2)
    loss.backward()
    assert values.grad is not None
    assert values.grad.nonzero().squeeze(1).tolist() == ends.tolist()


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("dpo", {"beta": 0.0}, "beta=0.0 must be above 0"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing=0.5 must be at least 0 and below 0.5"),
        ("kto", {"desirable_weight": 0.0}, "desirable_weight=0.0 must be above 0"),
        ("orpo", {"alpha": 0.0}, "use method=sft"),
        ("simpo", {"gamma": -1.0}, "gamma=-1.0 must be at least 0"),
        ("reward_model", {"center_coef": -1.0}, "center_coef=-1.0 must be at least 0"),
    ],
)
def test_knobs_that_cannot_work_are_refused(name: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ALGORITHMS[name][0](**knobs).check()  # type: ignore[call-arg]
