"""Every RL algorithm against its paper's formula, computed sequence by sequence in plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import ALGORITHMS, RLConfig, algorithm_of
from megarl.algorithms.grpo import GRPO
from megarl.knobs import UserError
from megarl.types import PackedBatch, TokenMean, cu_seqlens_of

LENGTHS = [5, 7, 4, 6, 9, 3, 5, 8]
PROMPTS = [2, 2, 1, 1, 4, 1, 3, 3]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2]


def make_batch(seed: int = 0, tool_turns: bool = False) -> PackedBatch:
    """Builds eight completions of three prompts, with every key that an algorithm reads, aligned as in losses.

    With `tool_turns`, most completions have untrained tokens inside, and some end in untrained tokens.
    """
    g = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)

    def near(scale: float) -> Tensor:
        return -1.5 + scale * torch.randn(total, generator=g)

    mask = torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPTS, strict=True)])
    if tool_turns:  # the middle of each completion, and its last token if that leaves one
        starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
        mask[[start + (p + n) // 2 for start, n, p in zip(starts, LENGTHS, PROMPTS, strict=True)]] = False
        mask[[start + n - 1 for start, n in zip(starts[1:-1:2], LENGTHS[1:-1:2], strict=True)]] = False
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.25, 1.0, 0.0, -1.0, 0.5])
    return PackedBatch(
        cu_seqlens_of(torch.tensor(LENGTHS)),
        {
            "loss_mask": mask,
            "prox_logp": near(0.4),
            "ref_logp": near(0.4),
            "rollout_logprobs": near(0.4),
            "values": near(0.5),
            "teacher_logp": near(0.8),
        },
        {
            "rewards": rewards,
            "group_ids": torch.tensor(GROUPS),
            "reward_columns": torch.stack([rewards, torch.randn(8, generator=g)], 1),
        },
    )


def split(values: Tensor, batch: PackedBatch) -> list[Tensor]:
    """Splits values into the trained tokens of each sequence."""
    pairs = zip(values.split(LENGTHS), batch["loss_mask"].split(LENGTHS), strict=True)
    return [part[mask] for part, mask in pairs]


def groups_of(values: list[float]) -> list[list[float]]:
    return [[v for v, h in zip(values, GROUPS, strict=True) if h == g] for g in GROUPS]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [v for row in rows for v in row]
    centre, width = mean(flat), std(flat)
    return [[(v - centre) / width for v in row] for row in rows]


def normalised(values: list[float]) -> list[float]:
    return [(v - mean(group)) / (std(group) + 1e-6) for v, group in zip(values, groups_of(values), strict=True)]


def centred(values: list[float]) -> list[float]:
    return [v - mean(group) for v, group in zip(values, groups_of(values), strict=True)]


def estimated_kl(r: Tensor, estimator: str) -> Tensor:
    """Schulman's estimators, of r = log pi_ref - log pi."""
    return {"k1": -r, "k2": r * r / 2, "k3": r.exp() - 1 - r}[estimator]


def longest_run(flags: list[bool]) -> int:
    return max(len(list(run)) for flag, run in itertools.groupby(flags) if flag)


def expected_advantages(name: str, batch: PackedBatch, config: Any) -> list[list[float]]:
    r = batch["rewards"].tolist()
    lengths = [len(row) for row in split(batch["values"], batch)]
    kl = split(estimated_kl(batch["ref_logp"] - batch["prox_logp"], config.kl_estimator), batch)

    def spread(per_sequence: list[float]) -> list[list[float]]:
        return [[v] * n for v, n in zip(per_sequence, lengths, strict=True)]

    if config.kl_coef and config.kl_in == "reward" and name not in ("ppo", "reinforce_pp"):
        r = [a - config.kl_coef * float(b.sum()) for a, b in zip(r, kl, strict=True)]
    if name == "dapo" and config.overlong_buffer:
        free = config.overlong_budget - config.overlong_buffer
        answers = [longest_run(flags.tolist()) for flags in batch["loss_mask"].split(LENGTHS)]
        r = [v - min(max((n - free) / config.overlong_buffer, 0), 1) for v, n in zip(r, answers, strict=True)]
    if name == "reinforce_pp" and config.group_baseline:
        r = centred(r)
    if name in ("grpo", "dapo", "gspo", "cispo", "decoupled_ppo"):
        return spread(normalised(r))
    if name == "dr_grpo":
        return spread(centred(r))
    if name == "rloo":
        return spread([v - (sum(g) - v) / (len(g) - 1) for v, g in zip(r, groups_of(r), strict=True)])
    if name == "reinforce":
        return spread([v - mean(r) if config.baseline else v for v in r])
    if name == "remax":
        return spread(r)
    if name == "opd":
        gaps = split(batch["teacher_logp"] - batch["prox_logp"], batch)
        rewards = [config.reward_coef * v if config.reward_coef else 0.0 for v in normalised(r)]
        bound = config.max_log_ratio
        return [
            [v + config.teacher_coef * max(-bound, min(bound, gap)) for gap in row.tolist()]
            for v, row in zip(rewards, gaps, strict=True)
        ]
    if name == "gdpo":
        first, second = (normalised(column) for column in batch["reward_columns"].T.tolist())
        weights = config.reward_weights or [1.0, 1.0]
        summed = [weights[0] * a + weights[1] * b for a, b in zip(first, second, strict=True)]
        return spread([(v - mean(summed)) / std(summed) for v in summed])
    rows = []
    for i, n in enumerate(lengths):
        rewards = [-config.kl_coef * k for k in kl[i].tolist()]
        rewards[-1] += r[i]
        if name == "reinforce_pp":
            rows.append([sum(config.gamma ** (s - t) * rewards[s] for s in range(t, n)) for t in range(n)])
            continue
        v = [*split(batch["values"], batch)[i].tolist(), 0.0]
        deltas = [rewards[t] + config.gamma * v[t + 1] - v[t] for t in range(n)]
        decay = config.gamma * config.gae_lambda
        rows.append([sum(decay ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)])
    return whitened(rows)


def expected_loss(name: str, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, config: Any) -> Tensor:
    """Computes the paper's loss, one completion at a time."""
    keys = ("prox_logp", "ref_logp", "rollout_logprobs", "advantages")
    pi, ent, prox, ref, rollout, adv = (split(x, batch) for x in (logprobs, entropy, *(batch[key] for key in keys)))
    losses = []
    for i in range(len(LENGTHS)):
        ratio = (pi[i] - prox[i]).exp()
        if name == "gspo":
            ratio = (pi[i] - prox[i]).mean().exp().expand_as(pi[i])
        if name in ("cispo", "rloo", "reinforce", "remax"):
            weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) if name == "cispo" else ratio
            loss = -weight.detach() * adv[i] * pi[i]
        else:
            low, high = (
                (config.clip_low, config.clip_high) if name in ("dapo", "gspo") else (config.eps_clip, config.eps_clip)
            )
            gain = torch.minimum(ratio * adv[i], ratio.clamp(1 - low, 1 + high) * adv[i])
            if name == "ppo" and config.dual_clip:
                gain = torch.where(adv[i] < 0, torch.maximum(gain, config.dual_clip * adv[i]), gain)
            loss = -gain
        weights = (prox[i] - rollout[i]).exp()
        product = math.prod(weights.tolist())
        mean_weight = product ** (1 / len(weights))
        weight = {"token": weights, "sequence": torch.full_like(weights, product)}.get(
            config.correction_level, torch.full_like(weights, mean_weight)
        )
        if config.correction == "truncate":
            loss = loss * weight.clamp(max=config.correction_high)
        if config.correction == "mask":
            loss = loss * weight * ((weight >= config.correction_low) & (weight <= config.correction_high))
        if min(weights.tolist()) < config.correction_veto or mean_weight < config.reject_low:
            loss = loss * 0
        if config.reject_high and mean_weight > config.reject_high:
            loss = loss * 0
        if config.kl_coef and config.kl_in == "loss":
            loss = loss + config.kl_coef * estimated_kl(ref[i] - pi[i], config.kl_estimator)
        losses.append(loss - config.entropy_coef * ent[i])
    if config.aggregate == "token":
        return torch.cat(losses).mean()
    if config.aggregate == "sequence":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.stack([loss.sum() / config.aggregate_tokens for loss in losses]).mean()


RL_NAMES = [name for name, (kind, _) in ALGORITHMS.items() if issubclass(kind, RLConfig)]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"aggregate_tokens": 24} if name == "dr_grpo" else {}) for name in RL_NAMES),
    ("grpo", {"aggregate": "sequence"}),
    ("grpo", {"kl_coef": 0.3}),
    ("grpo", {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k1"}),
    ("rloo", {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k1"}),
    ("rloo", {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k2"}),
    ("grpo", {"kl_coef": 0.3, "kl_estimator": "k1"}),
    ("grpo", {"kl_coef": 0.3, "kl_estimator": "k2"}),
    ("grpo", {"entropy_coef": 0.05}),
    ("gspo", {"entropy_coef": 0.05, "aggregate": "sequence"}),
    ("dapo", {"overlong_buffer": 4, "overlong_budget": 6}),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.4}),
    ("gdpo", {"reward_weights": [1.0, 0.25]}),
    ("reinforce", {"baseline": False}),
    ("reinforce_pp", {"kl_coef": 0.2}),
    ("reinforce_pp", {"kl_coef": 0.2, "kl_estimator": "k3", "gamma": 0.9}),
    ("reinforce_pp", {"group_baseline": True}),
    ("ppo", {"dual_clip": 1.1}),
    ("ppo", {"kl_coef": 0.2, "kl_estimator": "k2"}),
    ("ppo", {"kl_coef": 0.2, "gamma": 0.9, "gae_lambda": 0.8}),
    ("grpo", {"correction": "truncate", "correction_high": 1.2}),
    ("opd", {"teacher_coef": 0.5, "reward_coef": 2.0, "max_log_ratio": 0.3}),
    ("gspo", {"correction": "mask", "correction_low": 0.7, "correction_high": 1.4}),
    ("grpo", {"correction": "truncate", "correction_level": "sequence", "correction_high": 1.5}),
    ("grpo", {"correction": "mask", "correction_level": "sequence", "kl_coef": 0.3}),
    ("grpo", {"correction": "truncate", "correction_level": "geometric", "correction_high": 1.1}),
    ("gspo", {"correction": "mask", "correction_level": "geometric", "correction_low": 0.8, "correction_high": 1.2}),
    ("grpo", {"correction_veto": 0.5, "kl_coef": 0.3}),
    ("ppo", {"reject_low": 0.85, "reject_high": 1.3}),
    ("cispo", {"correction": "truncate", "correction_veto": 0.4, "reject_high": 1.2, "aggregate": "sequence"}),
]


@pytest.mark.parametrize("tool_turns", [False, True], ids=["whole", "tool turns"])
@pytest.mark.parametrize(("name", "knobs"), VARIANTS, ids=[f"{n}-{'-'.join(k) or 'defaults'}" for n, k in VARIANTS])
def test_advantages_loss_and_gradient_match_the_paper(name: str, knobs: dict[str, Any], tool_turns: bool) -> None:
    config: Any = ALGORITHMS[name][0](**knobs)  # type: ignore[call-arg]
    config.check()
    algorithm, batch = algorithm_of(config), make_batch(tool_turns=tool_turns)
    batch["advantages"] = algorithm.advantages(batch)
    rows = split(batch["advantages"], batch)
    for row, expected in zip(rows, expected_advantages(name, batch, config), strict=True):
        assert row.tolist() == pytest.approx(expected, abs=2e-5)
    assert batch["advantages"][~batch["loss_mask"]].abs().max() == 0
    g = torch.Generator().manual_seed(9)
    logprobs = batch["prox_logp"] + 0.6 * torch.randn(sum(LENGTHS), generator=g)
    entropy = torch.rand(sum(LENGTHS), generator=g).requires_grad_()
    assert float((logprobs - batch["prox_logp"])[batch["loss_mask"]].max()) > math.log(2)
    ours, theirs = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    loss, metrics = algorithm.loss(ours, entropy, batch)
    expected = expected_loss(name, theirs, entropy, batch, config)
    loss.backward()
    bonus = entropy.grad if entropy.grad is not None else torch.zeros_like(entropy)
    entropy.grad = None
    expected.backward()
    if entropy.grad is not None:
        torch.testing.assert_close(bonus, entropy.grad)
    assert (config.entropy_coef > 0) == bool(bonus.any())
    assert float(loss) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert ours.grad[~batch["loss_mask"]].abs().max() == 0
    assert all(math.isfinite(float(value)) for value in metrics.values() if not isinstance(value, TokenMean))
    means = {name: metric for name, metric in metrics.items() if isinstance(metric, TokenMean)}
    assert all(math.isfinite(metric.mean) and metric.tokens == batch["loss_mask"].sum() for metric in means.values())
    assert all(0 < means[name].mean < 1 for name in ("corrected", "rejected") if name in means)


def test_the_share_of_rejected_tokens_is_1_where_the_only_token_is_rejected() -> None:
    algorithm, batch = algorithm_of(ALGORITHMS["grpo"][0](reject_high=1.2)), make_batch()  # type: ignore[call-arg]
    batch["advantages"] = algorithm.advantages(batch)
    only = int(batch["loss_mask"].nonzero()[0])
    batch["loss_mask"] = torch.arange(batch.total_tokens) == only
    batch["rollout_logprobs"] = batch["prox_logp"] - 1
    _, metrics = algorithm.loss(batch["prox_logp"], torch.ones(batch.total_tokens), batch)
    assert metrics["rejected"] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("knobs", "needed"),
    [
        ({}, False),
        ({"n_minibatches": 2}, True),  # the policy changes before the second step
        ({"kl_coef": 0.3, "kl_in": "reward"}, True),  # rewards are computed before the update
        ({"kl_coef": 0.3, "kl_in": "loss"}, False),
        ({"correction": "truncate"}, False),
    ],
)
@pytest.mark.parametrize("name", RL_NAMES)
def test_needs_prox_logp_is_set_if_prox_logp_is_read_before_the_update(
    name: str, knobs: dict[str, Any], needed: bool
) -> None:
    config: Any = ALGORITHMS[name][0](aggregate_tokens=24, **knobs)  # type: ignore[call-arg]
    algorithm, batch = algorithm_of(config), make_batch()
    if name == "opd" or (config.kl_coef and config.kl_in == "reward"):  # the default of some algorithms
        needed = True
    assert algorithm.needs_prox_logp == needed
    if not needed:
        del batch.tokens["prox_logp"]
        batch["advantages"] = algorithm.advantages(batch)


@pytest.mark.parametrize("name", RL_NAMES)
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("untrained", [None, 2], ids=["", "with an untrained sequence"])
def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_parts(
    name: str, aggregate: str, untrained: int | None
) -> None:
    algorithm = algorithm_of(ALGORITHMS[name][0](aggregate=aggregate, aggregate_tokens=24))  # type: ignore[call-arg]
    batch = make_batch()
    if untrained is not None:
        batch["loss_mask"] &= torch.repeat_interleave(torch.arange(8), batch.lengths) != untrained
    batch["advantages"] = algorithm.advantages(batch)
    batch["logprobs"] = batch["prox_logp"] + 0.1
    whole, _ = algorithm.loss(batch["logprobs"], torch.ones(sum(LENGTHS)), batch)
    parts = [batch.select(indices) for indices in ([0, 3, 4], [1], [2, 5, 6, 7])]
    losses = [algorithm.loss(part["logprobs"], torch.ones(part.total_tokens), part)[0] for part in parts]
    weights = [float(algorithm.loss_weight(part)) for part in parts]
    joined = sum(w * float(loss) for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert joined == pytest.approx(float(whole), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", RL_NAMES)
def test_an_untrained_sample_changes_no_other_sample(name: str) -> None:
    config = ALGORITHMS[name][0](aggregate_tokens=24)  # type: ignore[call-arg]
    batch = make_batch()
    others = [0, 1, 3, 4, 5, 6, 7]
    batch["loss_mask"] = batch["loss_mask"].masked_fill(
        torch.repeat_interleave(torch.arange(8), batch.lengths) == 2, False
    )
    poisoned = make_batch()
    poisoned["loss_mask"] = batch["loss_mask"]
    poisoned["rewards"] = batch["rewards"].clone()
    poisoned["rewards"][2] = 1e6
    poisoned["reward_columns"][2] = -1e6
    results = []
    for case in (batch.select(others), poisoned):
        algorithm = algorithm_of(config)
        case["advantages"] = algorithm.advantages(case)
        logprobs = (case["prox_logp"] + 0.1).requires_grad_()
        algorithm.loss(logprobs, torch.ones_like(logprobs), case)[0].backward()
        results.append((case["advantages"], logprobs.grad))
    (adv, grad), (poisoned_adv, poisoned_grad) = results
    where = poisoned.token_index(others)
    assert torch.equal(adv, poisoned_adv[where])
    assert torch.equal(grad, poisoned_grad[where])
    assert not poisoned_grad.index_fill(0, where, 0.0).any()


def test_rewards_of_tokens_are_refused_by_the_algorithms() -> None:
    """They would take the first tokens' values for those of the samples."""
    batch = make_batch()
    del batch.sequences["rewards"]
    batch.set_tokens("rewards", torch.zeros(batch.total_tokens))
    with pytest.raises(UserError, match="rewards has a value for each token, and this needs one for each sequence"):
        algorithm_of(ALGORITHMS["grpo"][0]()).advantages(batch)  # type: ignore[call-arg]


def test_ppo_gives_the_critic_returns_and_clips_its_values() -> None:
    from megarl.algorithms.ppo import PPO, PPOConfig

    batch = make_batch()
    algorithm = PPO(PPOConfig(gae_lambda=1.0, value_clip=0.3))
    algorithm.advantages(batch)
    rewards = batch["rewards"].tolist()
    for row, reward in zip(split(batch["returns"], batch), rewards, strict=True):
        assert row.tolist() == pytest.approx([reward] * len(row), abs=1e-5)  # with lambda 1 the sum of later rewards
    values = (batch["values"] + 0.5 * torch.randn(sum(LENGTHS))).requires_grad_()
    loss, metrics = algorithm.value_loss(values, batch)
    mask, old, goal = batch["loss_mask"], batch["values"], batch["returns"]
    clamped = old + (values - old).clamp(-0.3, 0.3)
    expected = 0.5 * torch.maximum((values - goal) ** 2, (clamped - goal) ** 2)[mask].mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert 0 < float(metrics["value_clip_fraction"]) < 1


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("grpo", {"eps_clip": 0.0}, "eps_clip=0.0 must be above 0 and below 1"),
        ("grpo", {"eps_clip": 1.0}, "eps_clip=1.0"),
        ("grpo", {"n_minibatches": 0}, "n_minibatches=0 must be at least 1"),
        ("grpo", {"aggregate": "mean"}, "aggregate=mean must be one of token, sequence, constant"),
        ("grpo", {"aggregate": "constant"}, "aggregate=constant needs algorithm.aggregate_tokens above 0"),
        ("grpo", {"kl_in": "advantage"}, "kl_in=advantage must be one of loss, reward"),
        ("grpo", {"kl_estimator": "k4"}, "kl_estimator=k4"),
        ("grpo", {"kl_coef": -0.1}, "kl_coef=-0.1 must be at least 0"),
        ("grpo", {"correction": "tis"}, "correction=tis must be one of none, truncate, mask"),
        ("grpo", {"correction_low": 2.0, "correction_high": 1.0}, "correction_high=1.0 must be above"),
        ("dapo", {"clip_low": 0.0}, "clip_low=0.0"),
        (
            "dapo",
            {"overlong_buffer": 5, "overlong_budget": 4},
            "overlong_buffer=5 must be at most algorithm.overlong_budget=4",
        ),
        ("gspo", {"clip_high": 0.0}, "clip_high=0.0 must be above 0"),
        ("ppo", {"gae_lambda": 1.1}, "gae_lambda=1.1 must be at least 0 and at most 1"),
        ("ppo", {"dual_clip": 1.0}, "dual_clip=1.0 must be above 1"),
        ("ppo", {"value_clip": 0.0}, "value_clip=0.0 must be above 0"),
        ("reinforce_pp", {"gamma": 0.0}, "gamma=0.0"),
        ("gdpo", {"kl_coef": 0.1, "kl_in": "reward"}, "use kl_in=loss"),
        ("decoupled_ppo", {"correction": "none"}, "use truncate or mask, or algorithm=grpo"),
        ("grpo", {"correction_level": "sequence"}, "needs algorithm.correction=truncate or mask"),
        ("grpo", {"reject_high": 0.9}, "reject_high=0.9 must be above 1"),
        ("grpo", {"reject_low": 1.0}, "reject_low=1.0 must be at least 0 and below 1"),
        ("grpo", {"correction_veto": -0.1}, "correction_veto=-0.1 must be at least 0"),
    ],
)
def test_knobs_that_cannot_work_are_refused(name: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ALGORITHMS[name][0](**knobs).check()  # type: ignore[call-arg]


def test_gdpo_needs_a_weight_for_each_reward() -> None:
    batch = make_batch()
    algorithm: Callable[..., Any] = algorithm_of(ALGORITHMS["gdpo"][0](reward_weights=[1.0]))  # type: ignore[call-arg]
    with pytest.raises(UserError, match="reward_weights has 1 values and the samples carry 2 rewards"):
        algorithm.advantages(batch)  # type: ignore[attr-defined]


def test_a_loss_of_a_subclass_is_not_taken_for_one_by_token() -> None:
    config, _ = ALGORITHMS["grpo"]

    class Centred(GRPO):
        def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return (logprobs - logprobs.mean()).square().sum(), {}

    class ByToken(Centred):
        def by_token(self, given_prox_logp: bool) -> bool:
            return True

    answers = [kind(config()).by_token(False) for kind in (GRPO, Centred, ByToken)]
    assert answers == [True, False, True]
