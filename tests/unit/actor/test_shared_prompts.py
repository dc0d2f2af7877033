"""Common beginnings of a group's sequences, computed once: equal log-probs, losses and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.supervised import MegatronLMEngine
from megarl.algorithms import GRPO, GRPOConfig
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of
from tests.unit.actor.test_engine import config_of, gradients

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3", tied=True, vocab_size=343)


def shared_rollout() -> PackedBatch:
    """Two groups of four with shared prompts of 9 and 20 tokens. Their sequences alternate.

    Each group has an empty completion, and one of 3 tokens that both groups have.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 343, (n,), generator=generator) for n in (9, 20)]
    parts, masks, groups_ = [], [], []
    for length in (7, 3, 0, 12):
        for group, prompt in enumerate(prompts):
            completion = torch.arange(length) if length == 3 else torch.randint(0, 343, (length,), generator=generator)
            parts.append(torch.cat([prompt, completion]))
            masks.append(torch.arange(len(parts[-1])) >= len(prompt))
            groups_.append(group)
    ids = torch.cat(parts)
    return PackedBatch(
        cu_seqlens_of(torch.tensor([len(p) for p in parts])),
        {
            "input_ids": ids,
            "loss_mask": torch.cat(masks),
            "rollout_logprobs": torch.randn(ids.numel(), generator=generator),
        },
        {"rewards": torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 1]), "group_ids": torch.tensor(groups_)},
    )


@pytest.mark.parametrize("budget", [1000, 60, 32])
def test_a_shared_prompt_computed_once_gives_equal_log_probs_and_gradients(folder: Path, budget: int) -> None:
    results = []
    for shared in (False, True):
        config = config_of(folder, max_tokens_per_mb=budget, shared_prefix=shared)
        actor = MegatronPPOActor(config, GRPO(GRPOConfig(eps_clip=0.2)))
        actor.initialize()
        batch = shared_rollout()
        logp = actor.eval().logprobs(batch)
        batch["prox_logp"] = actor.compute_logp(batch) + 0.1
        actor.compute_advantages(batch)
        tokens = sum(mb.input_ids.numel() for mb in actor._microbatches(batch))
        results.append((logp, actor.ppo_update(batch), gradients(actor), tokens))
    (plain_logp, stats, plain_gradients, tokens), (shared_logp, shared_stats, shared_gradients, shared_tokens) = results
    torch.testing.assert_close(shared_logp, plain_logp, atol=1e-6, rtol=1e-6)
    assert shared_stats == pytest.approx(stats, rel=1e-5)
    for name, gradient in shared_gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], atol=1e-6, rtol=1e-5, msg=name)
    assert tokens == batch.total_tokens == 4 * 29 + 44
    if budget == 1000:
        assert shared_tokens == 29 + 44


ON_CPU = pytest.mark.cpu_options("actor.backend=cpu is for machines without a GPU")


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=ON_CPU), "torch"])
def test_branches_of_conversations_are_computed_once(folder: Path, backend: str) -> None:
    """Three conversations part after 200 and 330 tokens; the last page of 64 tokens is left to each."""
    turns = torch.randint(0, 343, (400,), generator=torch.Generator().manual_seed(0))
    ids = [turns, torch.cat((turns[:330], torch.arange(20))), torch.cat((turns[:200], torch.arange(50)))]
    lengths = torch.tensor([len(row) for row in ids])
    tokens = {"input_ids": torch.cat(ids), "loss_mask": torch.ones(int(lengths.sum()), dtype=torch.bool)}
    batch = PackedBatch(cu_seqlens_of(lengths), tokens, {"group_ids": torch.tensor([0, 0, 0])})
    results = []
    for shared in (False, True):
        engine = MegatronLMEngine(config_of(folder, shared_prefix=shared, backend=backend))
        engine.initialize()
        logprobs = engine.logprobs(batch)
        read = [len(mb.input_ids) for mb in engine._microbatches(batch)]
        results.append((logprobs, engine.train_lm(batch), gradients(engine), read))
    (plain, plain_step, plain_gradients, all_tokens), (shared_logprobs, step, found, read) = results
    assert all_tokens == [400 + 350 + 250]
    assert read == [400 + (350 - 256) + (250 - 200)]  # all three have 200 in common
    torch.testing.assert_close(shared_logprobs, plain, atol=2e-6, rtol=1e-6)
    assert step == pytest.approx(plain_step, rel=1e-5)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain_gradients[name], atol=2e-6, rtol=1e-5, msg=name)


def test_a_shared_prompt_is_refused_where_sequences_are_cut(folder: Path) -> None:
    with pytest.raises(UserError, match=r"shared_prefix=true takes whole sequences"):
        MegatronEngine(config_of(folder, shared_prefix=True), ParallelConfig(cp_size=2))
