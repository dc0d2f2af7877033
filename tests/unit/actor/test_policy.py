"""An update without `prox_logp` takes the proximal log-probs from its own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.reports import detached
from megarl.actor.weights import hf_weights
from megarl.algorithms import ALGORITHMS, algorithm_of
from megarl.parallel.determinism import OFF, Determinism, same_bits
from megarl.types import PackedBatch, TokenMean, cu_seqlens_of

pytestmark = pytest.mark.usefixtures("world_of_one")

LENGTHS = torch.tensor([9, 14, 7, 21, 11, 6, 16, 12])
PROMPTS = torch.tensor([3, 3, 3, 3, 5, 5, 5, 5])


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3", tied=True, vocab_size=343)


def batch_of() -> PackedBatch:
    """Two groups of four completions with shared prompts; one sequence has no trained token."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 343, (int(LENGTHS.sum()),), generator=generator)
    starts = (cu_seqlens_of(LENGTHS)[:-1]).tolist()
    for i, start in enumerate(starts):
        first, prompt = starts[i - i % 4], int(PROMPTS[i])
        ids[start : start + prompt] = ids[first : first + prompt]
    position = torch.cat([torch.arange(int(n)) for n in LENGTHS])
    mask = position >= PROMPTS.repeat_interleave(LENGTHS)
    mask[starts[2] : starts[3]] = False
    return PackedBatch(
        cu_seqlens_of(LENGTHS),
        {
            "input_ids": ids,
            "loss_mask": mask,
            "rollout_logprobs": -6 + 0.4 * torch.randn(len(ids), generator=generator),
            "ref_logp": -6 + 0.4 * torch.randn(len(ids), generator=generator),
            "advantages": torch.randn(len(ids), generator=generator) * mask,
        },
        {"group_ids": torch.arange(8) // 4},
    )


def actor_of(folder: Path, algorithm: Any, deterministic: Determinism = OFF, **knobs: Any) -> MegatronPPOActor:
    config = EngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-3, clip_grad=1.0), **knobs)
    actor = MegatronPPOActor(config, algorithm, deterministic=deterministic)
    actor.initialize()
    return actor


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}),
    "several microbatches": ("grpo", {"entropy_coef": 0.01}, {"max_tokens_per_mb": 30}),
    "shared prompts": ("grpo", {"kl_coef": 0.1}, {"shared_prefix": True, "max_tokens_per_mb": 50}),
    "sequence ratio": ("gspo", {"aggregate": "sequence"}, {"max_tokens_per_mb": 40}),
    "decoupled": ("decoupled_ppo", {"correction_high": 1.2}, {}),
    "IcePop": ("grpo", {"correction": "mask", "correction_low": 0.7, "correction_high": 1.4}, {}),
    "logits computed twice": ("cispo", {}, {"kept_logits_mb": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_update_without_them_is_the_update_with_those_that_it_finds(folder: Path, case: str) -> None:
    name, knobs, engine = CASES[case]
    algorithm = algorithm_of(ALGORITHMS[name][0](**knobs))
    without, batch = actor_of(folder, algorithm, **engine), batch_of()
    before = without.compute_logp(batch)
    stats = without.ppo_update(batch)
    torch.testing.assert_close(batch["prox_logp"], before, atol=1e-6, rtol=1e-6)
    assert bool((batch["prox_logp"] != 0)[batch["loss_mask"]].all())
    assert not batch["prox_logp"][~batch["loss_mask"]].any()
    assert set(batch.tokens) == {*batch_of().tokens, "prox_logp"}
    assert stats["ratio_max"] == 1.0
    assert stats["clip_fraction"] == 0.0

    reference = actor_of(folder, algorithm, **engine)  # the batch has prox_logp now
    assert reference.ppo_update(batch) == stats
    for actual, expected in zip(*(hf_weights.parameters(a.modules) for a in (without, reference)), strict=True):
        assert torch.equal(actual.main_grad, expected.main_grad)  # type: ignore[attr-defined]
        assert torch.equal(actual, expected)
    assert stats["grad_norm"] > 1e-3


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_metrics_do_not_depend_on_how_the_batch_was_cut(folder: Path, aggregate: str) -> None:
    knobs = {"aggregate": aggregate, "aggregate_tokens": 16, "correction": "mask", "kl_coef": 0.1, "reject_high": 1.2}
    algorithm, stats = algorithm_of(ALGORITHMS["grpo"][0](**knobs)), []
    for max_tokens_per_mb in (30, 1000):
        actor, batch = actor_of(folder, algorithm, max_tokens_per_mb=max_tokens_per_mb), batch_of()
        batch["prox_logp"] = actor.compute_logp(batch)
        noise = torch.randn(len(batch["input_ids"]), generator=torch.Generator().manual_seed(1))
        batch["prox_logp"] += 0.3 * noise * batch["loss_mask"]
        stats.append(actor.ppo_update(batch))
    assert stats[0] == pytest.approx(stats[1], rel=1e-4)
    assert 0 < stats[0]["clip_fraction"] < 1
    assert 0 < stats[0]["rejected"] < 1


def test_metrics_keep_no_graph() -> None:
    with_graph = torch.ones(1, requires_grad=True).sum()
    metrics = detached({"mean": TokenMean(with_graph, with_graph), "plain": with_graph, "number": 2.0})
    assert metrics["number"] == 2.0
    mean = metrics["mean"]
    assert isinstance(mean, TokenMean)
    assert [part.requires_grad for part in (*mean, metrics["plain"])] == [False] * 3  # type: ignore[union-attr]


@pytest.mark.cpu_options("rollout and trainer compute the same bits on CPU only")
def test_a_deterministic_update_finds_the_same_bits(folder: Path) -> None:
    batch = batch_of()
    actor = actor_of(folder, algorithm_of(ALGORITHMS["grpo"][0]()), deterministic=same_bits(1))
    before = actor.compute_logp(batch)
    actor.ppo_update(batch)
    assert torch.equal(batch["prox_logp"], before)


def test_several_steps_on_a_batch_need_them_beforehand(folder: Path) -> None:
    actor, batch = actor_of(folder, algorithm_of(ALGORITHMS["grpo"][0](n_minibatches=2))), batch_of()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"the batch has no prox_logp, and algorithm\.n_minibatches=2 steps"):
        actor.ppo_update(batch)
