"""The optimizer follows closed forms: schedules, weight decay, clipping, bfloat16, recomputed activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from megarl.actor.api import FinetuneSpec
from megarl.actor.checks import check_device, model_checks
from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.optimizer import build_scheduler
from megarl.actor.supervised import MegatronLMEngine, lm_loss, trained_tokens
from megarl.knobs import UserError, run_all
from megarl.parallel.config import ParallelConfig
from tests.unit.actor.memory_worker import batch

pytestmark = pytest.mark.usefixtures("world_of_one")

PEAK, FLOOR, WARMUP, STEPS = 1e-3, 0.1, 4, 20


class Groups:
    """Optimizer stub for schedules: parameter groups of weights and of norms."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3", tied=True, vocab_size=343)


def engine_of(folder: Path, steps: int = STEPS, **fields: Any) -> MegatronLMEngine:
    optimizer = OptimizerConfig(**{"lr": PEAK, "clip_grad": 0.0, **fields.pop("optimizer", {})})
    engine = MegatronLMEngine(EngineConfig(path=str(folder), optimizer=optimizer, **fields))
    engine.initialize(ft_spec=FinetuneSpec(1, steps, 1))
    return engine


# Learning rate of step n, counted from 1, by the paper or Megatron's documentation.
def decayed(ratio: float) -> float:
    return PEAK * (FLOOR + (1 - FLOOR) * ratio)


def progress(n: int) -> float:
    return (n - WARMUP) / (STEPS + 1 - WARMUP)


def wsd_progress(n: int) -> float:
    """Fraction of the last 6 steps that has passed; 0 before them."""
    return max(0.0, (n - (STEPS + 1 - 6)) / 6)


FORMULAS: dict[str, Callable[[int], float]] = {
    "constant": lambda n: PEAK,
    "linear": lambda n: decayed(1 - progress(n)),
    "cosine": lambda n: decayed(0.5 * (1 + math.cos(math.pi * progress(n)))),
    "inverse-square-root": lambda n: max(PEAK * FLOOR, PEAK * math.sqrt(WARMUP / n)),
    "WSD linear": lambda n: decayed(1 - wsd_progress(n)),
    "WSD cosine": lambda n: decayed(0.5 * (1 + math.cos(math.pi * wsd_progress(n)))),
    "WSD exponential": lambda n: decayed(2 * 0.5 ** wsd_progress(n) - 1),
    "WSD minus_sqrt": lambda n: decayed(1 - math.sqrt(wsd_progress(n))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_follows_its_formula(name: str) -> None:
    style, _, wsd = name.partition(" ")
    fields = {"wsd_decay_steps": 6, "lr_wsd_decay_style": wsd} if wsd else {}
    config = OptimizerConfig(lr=PEAK, min_lr_ratio=FLOOR, lr_decay_style=style, warmup_steps=WARMUP, **fields)
    optimizer = Groups()
    scheduler = build_scheduler(config, optimizer, FinetuneSpec(1, STEPS, 1))
    for n in range(1, STEPS + 1):
        expected = PEAK * n / WARMUP if n <= WARMUP else FORMULAS[name](n)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-6), n
        scheduler.step(1)


def test_a_decay_longer_than_the_run_is_refused() -> None:
    config = OptimizerConfig(lr_decay_style="WSD", wsd_decay_steps=18, warmup_steps=3)
    with pytest.raises(UserError, match=r"warmup_steps=3 \+ wsd_decay_steps=18 exceed the run's 20 steps"):
        build_scheduler(config, Groups(), FinetuneSpec(1, 20, 1))


def test_norms_and_biases_are_not_decayed(checkpoints: Callable[..., Path]) -> None:
    """Without gradients Adam changes nothing, so a step shows only the decay: p * (1 - lr * decay)."""
    engine = engine_of(checkpoints("qwen2", tied=False, vocab_size=343), optimizer={"lr": 0.1, "weight_decay": 0.5})
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.train_batch(batch(343, 2, 8), lambda lp, ent, data: lp.sum() * 0.0, trained_tokens, loss_input="logprobs")
    kinds = set()
    for name, tensor in engine.named_weights():
        undecayed = name.endswith("bias") or "norm" in name
        kinds.add(undecayed)
        torch.testing.assert_close(tensor, before[name] * (1.0 if undecayed else 1 - 0.1 * 0.5), msg=name)
    assert kinds == {True, False}


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_gradients_are_clipped_to_the_norm_that_is_asked_for(folder: Path, clip: float) -> None:
    engine = engine_of(folder, optimizer={"clip_grad": clip})
    stats = engine.train_lm(batch(343, 3, 20))
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    gradients = [p.grad for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
    assert stats["grad_norm"] > 0.5  # before clipping
    assert norm == pytest.approx(min(clip, stats["grad_norm"]), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputing_activations_changes_no_bit(folder: Path, dtype: str) -> None:
    def run(recompute: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        engine = engine_of(folder, recompute=recompute, dtype=dtype, max_tokens_per_mb=40)
        stats = [engine.train_lm(batch(343, 4, 20)) for _ in range(3)]
        return stats, {name: tensor.clone() for name, tensor in engine.named_weights()}

    expected, weights = run("none")
    for recompute in ("selective", "full"):
        stats, trained = run(recompute)
        assert stats == expected
        assert all(torch.equal(trained[name], weights[name]) for name in weights)


def test_bfloat16_parameters_learn_like_float32_ones(folder: Path) -> None:
    """Updates far below bfloat16's resolution (2^-8) must accumulate in the float32 main parameters."""
    engines = {dtype: engine_of(folder, dtype=dtype, optimizer={"lr": 1e-4}) for dtype in ("float32", "bfloat16")}
    losses = {
        dtype: [engine.train_lm(batch(343, 4, 20))["loss"] for _ in range(30)] for dtype, engine in engines.items()
    }
    exact, coarse = losses["float32"], losses["bfloat16"]
    assert exact[-1] < exact[0] - 0.3
    assert coarse[0] - coarse[-1] == pytest.approx(exact[0] - exact[-1], rel=0.1)


def test_optimizer_offload_is_refused_without_a_gpu() -> None:
    config = EngineConfig(offload_optimizer=True, dtype="bfloat16")
    check_device(config, has_gpu=True)
    with pytest.raises(UserError, match=r"actor\.offload_optimizer=true moves optimizer state from a GPU"):
        check_device(config, has_gpu=False)


def test_optimizer_offload_is_refused_for_parameters_that_are_their_own_main_parameters() -> None:
    """Megarl's main parameters of float32 are views of the model's, and torch optimizes no view."""
    with pytest.raises(UserError, match=r"offload_optimizer=true needs main parameters .*set actor\.dtype=bfloat16"):
        check_device(EngineConfig(offload_optimizer=True), has_gpu=True)


def test_optimizer_offload_is_refused_for_models_with_trained_float32(checkpoints: Callable[..., Path]) -> None:
    model = AutoConfig.from_pretrained(checkpoints("qwen3_next", tied=False))
    for lora, refused in ((LoraConfig(), True), (LoraConfig(rank=2), False)):
        config = EngineConfig(offload_optimizer=True, dtype="bfloat16", lora=lora)
        with pytest.raises(UserError, match="'qwen3_next' model's gated delta") if refused else nullcontext():
            run_all(model_checks(config, ParallelConfig(), model))


def test_a_step_with_a_nan_is_skipped_and_the_next_goes_on(folder: Path) -> None:
    engine = engine_of(folder)

    def poisoned(logprobs: Tensor, entropy: Tensor, data: Any) -> Any:
        loss, metrics = lm_loss(logprobs, entropy, data)
        return loss * float("inf"), metrics

    before = engine.train_lm(batch(343, 2, 20))
    skipped = engine.train_batch(batch(343, 2, 20), poisoned, trained_tokens, loss_input="logprobs")
    after = engine.train_lm(batch(343, 2, 20))
    assert (before["skipped_steps"], skipped["skipped_steps"], after["skipped_steps"]) == (0.0, 1.0, 0.0)
    assert after["loss"] < before["loss"]
