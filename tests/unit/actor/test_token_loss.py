"""Updates whose head takes the loss's gradients chunk by chunk have the bits of updates that compute logits twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.supervised import MegatronLMEngine, lm_loss, trained_tokens
from megarl.actor.weights import hf_weights
from megarl.algorithms import ALGORITHMS, algorithm_of
from megarl.ops import linear_logprob
from megarl.ops.known_gradients import logprobs_of_token_loss
from megarl.types import PackedBatch
from tests.unit.actor.test_policy import actor_of, batch_of

pytestmark = pytest.mark.usefixtures("world_of_one")

CHUNKS = {"kept_logits_mb": 0}
SEQUENCES: dict[str, Any] = {"correction": "truncate", "correction_level": "geometric"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {"entropy_coef": 0.01, "kl_coef": 0.1}, {}),
    "cispo, several microbatches": ("cispo", {"correction": "truncate"}, {"max_tokens_per_mb": 30}),
    "shared prompts": ("dapo", {"aggregate": "sequence"}, {"shared_prefix": True, "max_tokens_per_mb": 50}),
    "decoupled": ("decoupled_ppo", {"correction_high": 1.2}, {}),
    "bfloat16, float32 head": ("grpo", {}, {"dtype": "bfloat16", "float32_head": True, "backend": "torch"}),
    "sequence ratio": ("gspo", {"aggregate": "sequence"}, {"max_tokens_per_mb": 40}),
    "adapters": ("reinforce", {"entropy_coef": 0.1}, {"lora": LoraConfig(rank=4)}),
}


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3", tied=True, vocab_size=343)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the products of hidden states and head that updates in chunks compute."""
    shapes: list[tuple[int, ...]] = []
    plain = linear_logprob.product

    def counted(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        shapes.append(tuple(out.shape))
        return plain(x, weight, out)

    monkeypatch.setattr(linear_logprob, "product", counted)
    monkeypatch.setattr(linear_logprob, "cpu_chunk_rows", lambda total: 7)
    return shapes


def of_bits(actor: Any) -> list[Tensor]:
    parameters = hf_weights.parameters(actor.modules)
    return [p.detach() for p in parameters] + [p.main_grad for p in parameters if p.requires_grad]  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("given", [False, True], ids=["own log-probs", "given log-probs"])
def test_the_gradients_are_taken_while_the_logits_are_there(
    folder: Path, case: str, given: bool, products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, knobs, engine = CASES[case]
    algorithm = algorithm_of(ALGORITHMS[name][0](**knobs))
    if not algorithm.by_token(given):
        assert (name, given) == ("gspo", True)
        return
    stats, bits, batches, counts = [], [], [], []
    for by_token in (False, True):
        monkeypatch.setattr(type(algorithm), "by_token", lambda *_, answer=by_token: answer)
        actor, batch = actor_of(folder, algorithm, **CHUNKS, **engine), batch_of()
        if given:
            batch["prox_logp"] = batch["rollout_logprobs"] + 0.1 * batch["advantages"]
        products.clear()
        stats.append(actor.ppo_update(batch))
        counts.append(len(products))
        bits.append(of_bits(actor))
        batches.append(batch)
    assert stats[0] == stats[1]
    assert stats[0]["grad_norm"] > 1e-3
    assert torch.equal(*(b["prox_logp"] for b in batches))
    for twice, once in zip(*bits, strict=True):
        assert torch.equal(twice, once)
    assert counts[0] == 2 * counts[1]
    assert counts[1] > 3


def test_supervised_training_computes_logits_once(folder: Path, products: list[tuple[int, ...]]) -> None:
    stats, bits, counts = [], [], []
    for once in (False, True):
        config = EngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-3), max_tokens_per_mb=30, **CHUNKS)
        engine = MegatronLMEngine(config)
        engine.initialize()
        products.clear()
        if once:
            stats.append(engine.train_lm(batch_of()))
        else:
            stats.append(engine.train().train_batch(batch_of(), lm_loss, trained_tokens, loss_input="logprobs"))
        counts.append(len(products))
        bits.append(of_bits(engine))
    assert stats[0] == stats[1]
    for twice, alone in zip(*bits, strict=True):
        assert torch.equal(twice, alone)
    assert counts[0] == 2 * counts[1]


@pytest.mark.parametrize(
    ("name", "knobs", "own", "given"),
    [
        ("grpo", {}, True, True),
        ("gspo", {}, True, False),
        ("gspo", {"correction": "truncate"}, False, False),
        ("gspo", {"reject_high": 1.5}, False, False),
        ("grpo", SEQUENCES, False, True),
        ("grpo", {"correction_veto": 1e-4}, False, True),
        ("ppo", {"kl_coef": 0.1}, True, True),
    ],
)
def test_losses_of_whole_sequences_compute_logits_twice(
    folder: Path, name: str, knobs: dict[str, Any], own: bool, given: bool, products: list[tuple[int, ...]]
) -> None:
    algorithm = algorithm_of(ALGORITHMS[name][0](**knobs))
    assert (algorithm.by_token(False), algorithm.by_token(True)) == (own, given)
    actor, batch = actor_of(folder, algorithm, **CHUNKS), batch_of()
    actor.ppo_update(batch)
    rows = int(batch["loss_mask"].sum())
    assert sum(shape[0] for shape in products) == rows * (1 if own else 2)


def test_a_loss_that_reads_other_tokens_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = algorithm_of(ALGORITHMS["gspo"][0]())
    monkeypatch.setattr(type(algorithm), "by_token", lambda *_: True)
    monkeypatch.setattr(linear_logprob, "cpu_chunk_rows", lambda total: 7)
    actor, batch = actor_of(folder, algorithm, **CHUNKS), batch_of()
    batch["prox_logp"] = batch["rollout_logprobs"]
    with pytest.raises(RuntimeError, match=r"which depend on other tokens, by .*`by_token` must return False"):
        actor.ppo_update(batch)


def test_a_loss_that_is_not_finite_skips_the_step(folder: Path) -> None:
    algorithm = algorithm_of(ALGORITHMS["grpo"][0]())
    actor, batch = actor_of(folder, algorithm, **CHUNKS), batch_of()
    before = [p.clone() for p in hf_weights.parameters(actor.modules)]
    poisoned = PackedBatch(batch.cu_seqlens, {**batch.tokens}, batch.sequences)
    poisoned["advantages"] = batch["advantages"] / 0
    assert actor.ppo_update(poisoned)["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, hf_weights.parameters(actor.modules), strict=True))


def test_kept_logits_need_no_chunks(folder: Path, products: list[tuple[int, ...]]) -> None:
    actor = actor_of(folder, algorithm_of(ALGORITHMS["grpo"][0]()))
    assert isinstance(actor, MegatronPPOActor)
    actor.ppo_update(batch_of())
    assert products == []


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("count", [5, 0], ids=["labels", "no label"])
def test_told_gradients_of_a_frozen_head_are_those_of_logits_computed_twice(count: int, with_entropy: bool) -> None:
    """A rank without a label, too, has a gradient: all its parameters get one."""
    generator = torch.Generator().manual_seed(0)
    weight, labels = torch.randn(11, 6, generator=generator), torch.full((9,), -1)
    rows = torch.randperm(9, generator=generator)[:count].sort().values
    labels[rows] = torch.arange(count)
    found = []
    for once in (True, False):
        hidden = torch.randn(9, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        inputs, options = (hidden, weight, labels), {"rows": rows, "vocab_valid": 11, "with_entropy": with_entropy}
        if once:
            logprobs, entropy = logprobs_of_token_loss(*inputs, told, chunk_rows=2, **options)
        else:
            logprobs, entropy = linear_logprob.linear_logprobs(*inputs, chunk_rows=2, **options)
        assert (entropy is not None) == with_entropy
        loss = (0.5 * logprobs).sum() - (0.0 if entropy is None else (2.0 * entropy).sum())
        loss.backward()
        found.append((logprobs.detach(), loss.detach(), hidden.grad))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert bool(found[0][2].any()) == (count > 0)


def told(logprobs: Tensor, entropy: Tensor | None, rows: Tensor) -> tuple[Tensor, ...]:
    of_logprobs = torch.full_like(logprobs, 0.5)
    return (of_logprobs,) if entropy is None else (of_logprobs, torch.full_like(entropy, -2.0))


@pytest.mark.parametrize("once", [True, False], ids=["logits once", "logits twice"])
def test_skipped_gradient_reaches_the_head_of_every_loss(
    folder: Path, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new model is sure of nothing, so no column is left out."""
    asked: list[tuple[float, Any]] = []
    plain = linear_logprob.kept_columns

    def noted(gradient: Tensor, share: float, group: Any) -> Tensor | None:
        asked.append((share, group))
        return plain(gradient, share, group)

    monkeypatch.setattr(linear_logprob, "kept_columns", noted)
    bits = []
    for skipped in (0.0, 0.01):
        algorithm = algorithm_of(ALGORITHMS["grpo"][0]())
        actor, batch = actor_of(folder, algorithm, **CHUNKS, skipped_gradient=skipped), batch_of()
        if once:
            actor.ppo_update(batch)
        else:
            actor.train().train_batch(batch, lm_loss, trained_tokens, loss_input="logprobs")
        bits.append(of_bits(actor))
        assert set(asked) == ({(skipped, None)} if skipped else set())
    assert all(torch.equal(*both) for both in zip(*bits, strict=True))
