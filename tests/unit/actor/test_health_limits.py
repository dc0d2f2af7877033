"""Steps that are skipped: how many in a row, and gradients that the norm does not see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.actor import engine as engine_module
from megarl.actor.config import EngineConfig
from megarl.actor.health import NonFiniteError, SkippedSteps, gradients_are_finite
from megarl.actor.supervised import MegatronLMEngine
from megarl.types import PackedBatch, cu_seqlens_of

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_as_many_steps_in_a_row_as_the_limit_are_skipped_and_no_more() -> None:
    steps = SkippedSteps(2)
    for skipped in (True, True, False, True, True):
        steps.record(skipped, 1.0, 1.0)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* actor\.max_skipped_steps=2 allows 2"):
        steps.record(True, 1.0, 1.0)
    with pytest.raises(NonFiniteError, match="1 step in a row"):
        SkippedSteps(0).record(True, 1.0, 1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["buffers", "expert_parallel_buffers"])
def test_every_element_of_every_gradient_buffer_is_scanned(kind: str, value: float) -> None:
    """Buffers of experts exist only on several ranks; here they are tensors without a module."""
    sizes = {"buffers": (3, 5), "expert_parallel_buffers": (4,)}
    module = SimpleNamespace(**{name: [buffer(n) for n in counts] for name, counts in sizes.items()})
    assert gradients_are_finite([module])
    for part in getattr(module, kind):
        for i in range(len(part.grad_data)):
            part.grad_data[i] = value
            assert not gradients_are_finite([module])
            part.grad_data[i] = 0.0
    assert gradients_are_finite([module])
    assert gradients_are_finite([])


def buffer(size: int) -> Any:
    return SimpleNamespace(grad_data=torch.zeros(size))


def test_a_gradient_that_another_rank_counts_in_the_norm_is_scanned_too(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron leaves parameters marked `shared` out of the norm, such as the embedding's copy of the last stage."""
    build, marked = engine_module.build_optimizer, []

    def marks_one(config: Any, ddps: list[Any], dtype: torch.dtype) -> Any:
        marked.append(next(p for name, p in ddps[0].named_parameters() if name.endswith("final_layernorm.weight")))
        marked[0].shared = True
        return build(config, ddps, dtype)

    monkeypatch.setattr(engine_module, "build_optimizer", marks_one)
    engine = MegatronLMEngine(EngineConfig(path=str(checkpoints("qwen3", tied=True, vocab_size=343))))
    engine.initialize()
    ids = torch.arange(20)
    batch = PackedBatch(cu_seqlens_of(torch.tensor([20])), {"input_ids": ids, "loss_mask": torch.ones(20).bool()})
    handle = marked[0].register_hook(lambda gradient: gradient * float("nan"))
    stats = engine.train_lm(batch)
    assert stats["skipped_steps"] == 1.0
    assert stats["grad_norm"] < 1e6  # finite: the norm has not seen it
    handle.remove()
    assert engine.train_lm(batch)["skipped_steps"] == 0.0


@pytest.mark.parametrize("extra", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_takes_no_step_though_its_gradient_is(
    checkpoints: Callable[..., Path], extra: float
) -> None:
    engine = MegatronLMEngine(EngineConfig(path=str(checkpoints("qwen3", tied=True, vocab_size=343))))
    engine.initialize()
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    batch = PackedBatch(cu_seqlens_of(torch.tensor([20])), {"input_ids": torch.arange(20)})
    stats = engine.train_batch(
        batch, lambda lp, entropy, data: lp.sum() + extra, lambda data: 1.0, loss_input="logprobs"
    )
    assert stats["skipped_steps"] == 1.0
    assert 0 < stats["grad_norm"] < float("inf")
    for name, tensor in engine.named_weights():
        assert torch.equal(tensor, before[name])
