"""Value head and frozen reference: values, steps, scores and weights equal transformers'."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.critic import MegatronPPOCritic, MegatronScalarEngine
from megarl.actor.engine import MegatronEngine
from megarl.actor.reference import MegatronReference
from megarl.actor.weights import hf_weights
from megarl.algorithms import PPO, PPOConfig
from megarl.knobs import UserError
from megarl.types import PackedBatch, cu_seqlens_of

pytestmark = pytest.mark.usefixtures("world_of_one")

LENGTHS = [9, 14, 7, 21, 11, 6]


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3", tied=False, vocab_size=343)


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.0), **fields)


def rollout() -> PackedBatch:
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    return PackedBatch(
        cu_seqlens_of(torch.tensor(LENGTHS)),
        {
            "input_ids": torch.randint(0, 343, (total,), generator=generator),
            "loss_mask": position >= 3,
            "values": torch.randn(total, generator=generator),
            "returns": torch.randn(total, generator=generator),
        },
    )


def critic_of(folder: Path, **fields: Any) -> MegatronPPOCritic:
    critic = MegatronPPOCritic(config_of(folder, **fields), PPO(PPOConfig(value_clip=0.2)))
    critic.initialize()
    return critic


def reference_values(model: Any, batch: PackedBatch) -> Tensor:
    """Values before each token, computed by transformers; 0 at first tokens."""
    parts = []
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        hidden = model.model(batch["input_ids"][None, start:stop]).last_hidden_state[0]
        parts += [torch.zeros(1), model.score(hidden)[:-1, 0]]
    return torch.cat(parts)


@pytest.mark.parametrize("budget", [1000, 21])
def test_values_and_the_gradient_of_the_clipped_value_loss_equal_plain_torch(
    folder: Path, tmp_path: Path, budget: int
) -> None:
    critic = critic_of(folder, value_head_std=0.3, max_tokens_per_mb=budget)
    critic.save(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    batch = rollout()
    expected = reference_values(model, batch)
    torch.testing.assert_close(critic.compute_values(batch), expected.detach(), atol=1e-5, rtol=1e-5)

    stats = critic.ppo_update(batch)
    mask, old, returns = batch["loss_mask"], batch["values"], batch["returns"]
    clipped = torch.clamp(expected, old - 0.2, old + 0.2)
    loss = (0.5 * torch.max((expected - returns) ** 2, (clipped - returns) ** 2))[mask].mean()
    loss.backward()
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
    assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_new_value_head_starts_at_zero_and_learns(folder: Path) -> None:
    critic, batch = critic_of(folder), rollout()
    assert (critic.compute_values(batch) == 0).all()
    losses = []
    for _ in range(4):
        batch["values"] = critic.compute_values(batch)
        losses.append(critic.ppo_update(batch)["loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_a_score_is_the_head_at_the_last_token(folder: Path, tmp_path: Path) -> None:
    engine = MegatronScalarEngine(config_of(folder, value_head_std=0.3, max_tokens_per_mb=25), trainable=False)
    engine.initialize()
    engine.save(tmp_path)
    model, batch = AutoModelForSequenceClassification.from_pretrained(tmp_path), rollout()
    ids = batch["input_ids"].split(LENGTHS)
    with torch.no_grad():
        expected = torch.cat([model(part[None]).logits[0] for part in ids])
    torch.testing.assert_close(engine.scores(batch), expected, atol=1e-5, rtol=1e-5)


def test_a_critic_goes_on_from_its_state_and_from_its_export(folder: Path, tmp_path: Path) -> None:
    critic, batch = critic_of(folder, value_head_std=0.3), rollout()
    critic.ppo_update(batch)
    critic.save_state(tmp_path / "state")
    critic.save(tmp_path / "hf")
    expected = critic.compute_values(batch)
    after = critic.ppo_update(batch)
    assert torch.equal(critic_of(tmp_path / "hf").compute_values(batch), expected)
    resumed = critic_of(folder)
    resumed.load_state(tmp_path / "state")
    assert torch.equal(resumed.compute_values(batch), expected)
    assert resumed.ppo_update(batch) == after
    with pytest.raises(UserError, match="gives scores, not text"):
        MegatronEngine(config_of(tmp_path / "hf"))


def test_a_reference_gives_the_models_log_probs_and_its_weights_wait_on_the_host(folder: Path) -> None:
    reference, batch = MegatronReference(config_of(folder)), rollout()
    reference.initialize()
    assert reference.optimizer is None
    assert not any(hasattr(p, "main_grad") or p.requires_grad for p in hf_weights.parameters(reference.modules))
    logp = reference.compute_logp(batch)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for i, (start, stop) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        ids = batch["input_ids"][start:stop]
        table = torch.log_softmax(model(ids[None]).logits[0], -1)
        expected = torch.cat([torch.zeros(1), table[:-1].gather(1, ids[1:, None]).squeeze(1)])
        expected = torch.where(batch["loss_mask"][start:stop], expected, 0.0)
        torch.testing.assert_close(logp[start:stop], expected.detach(), atol=1e-5, rtol=0, msg=str(i))

    before = [p.clone() for p in hf_weights.parameters(reference.modules)]
    reference.offload()
    assert sum(p.untyped_storage().size() for p in hf_weights.parameters(reference.modules)) == 0
    reference.offload()
    reference.onload()
    for parameter, value in zip(hf_weights.parameters(reference.modules), before, strict=True):
        assert torch.equal(parameter, value)
    reference.offload()
    assert torch.equal(reference.compute_logp(batch), logp)
