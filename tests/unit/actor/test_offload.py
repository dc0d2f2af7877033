"""Memory that an engine gives up between two updates and gets back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.actor.api import FinetuneSpec
from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.gpu import offload
from megarl.actor.gpu.offload import LEAST_PIECE, PARTS, EngineMemory, Offloaded, pinned_sizes
from megarl.actor.reference import MegatronReference
from megarl.actor.supervised import MegatronLMEngine
from megarl.types import PackedBatch, cu_seqlens_of

pytestmark = pytest.mark.usefixtures("world_of_one")


def texts(seed: int) -> PackedBatch:
    lengths = torch.tensor([7, 12, 5, 9])
    tokens = int(lengths.sum())
    ids = torch.randint(0, 300, (tokens,), generator=torch.Generator().manual_seed(seed))
    return PackedBatch(cu_seqlens_of(lengths), {"input_ids": ids, "loss_mask": torch.ones(tokens, dtype=torch.bool)})


def trained(folder: Path, dtype: str, rest: tuple[str, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of three steps, with `rest` offloaded between the steps."""
    engine = MegatronLMEngine(EngineConfig(path=str(folder), dtype=dtype, optimizer=OptimizerConfig(lr=1e-2)))
    engine.initialize(ft_spec=FinetuneSpec(1, 3, 1))
    memory, losses = EngineMemory(engine), []
    for seed in range(3):
        losses.append(engine.train_lm(texts(seed))["loss"])
        memory.offload(*rest)
        if "parameters" in rest:
            assert {p.untyped_storage().nbytes() for p in engine.modules[0].parameters()} == {0}
        if "gradients" in rest:
            assert engine.ddps[0].buffers[0].grad_data.untyped_storage().nbytes() == 0
        memory.restore(*rest)
    return losses, {name: tensor.clone() for name, tensor in engine.named_weights()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rest", [PARTS, ("gradients", "optimizer")])
def test_training_goes_on_with_the_same_bits(
    rest: tuple[str, ...], dtype: str, checkpoints: Callable[..., Path]
) -> None:
    folder = checkpoints("qwen3", tied=True)
    losses, weights = trained(folder, dtype, ())
    losses_after_rests, weights_after_rests = trained(folder, dtype, rest)
    assert losses_after_rests == losses
    assert len(set(losses)) == 3
    for name, weight in weights.items():
        assert torch.equal(weights_after_rests[name], weight), name


@pytest.mark.parametrize(("dtype", "per_parameter"), [("float32", 8), ("bfloat16", 12)])
def test_the_optimizer_gives_up_moments_and_main_parameters(
    dtype: str, per_parameter: int, checkpoints: Callable[..., Path]
) -> None:
    """As `actor/sizes/memory.py` counts them: the main parameters of float32 models are the parameters."""
    engine = MegatronLMEngine(EngineConfig(path=str(checkpoints("qwen3", tied=True)), dtype=dtype))
    engine.initialize(ft_spec=FinetuneSpec(1, 3, 1))
    engine.train_lm(texts(0))
    parameters = sum(p.numel() for p in engine.modules[0].parameters())
    memory = EngineMemory(engine)
    freed = {part: memory.offload(part) for part in PARTS}
    assert memory.offload(*PARTS) == 0
    memory.restore(*PARTS)
    assert freed["optimizer"] == pytest.approx(per_parameter * parameters, rel=0.01)
    assert freed["gradients"] == pytest.approx(4 * parameters, rel=0.01)
    assert freed["parameters"] == pytest.approx((4 if dtype == "float32" else 2) * parameters, rel=0.01)


def test_copies_in_8_bits_leave_with_the_parameters(checkpoints: Callable[..., Path]) -> None:
    """As Transformer Engine's layers keep them. This does not cover that a pass makes them anew."""
    config = EngineConfig(path=str(checkpoints("qwen3", tied=True)))
    engine, reference = MegatronLMEngine(config), MegatronReference(config)
    engine.initialize(ft_spec=FinetuneSpec(1, 3, 1))
    reference.initialize()
    kept = []
    for model in (engine, reference):
        layer = model.modules[0].decoder.layers[1].mlp.linear_fc1
        layer._fp8_workspaces = {"weight": torch.zeros(8, dtype=torch.uint8)}
        kept.append(layer._fp8_workspaces)
    memory = EngineMemory(engine)
    memory.offload("gradients", "optimizer")
    assert len(kept[0]) == 1
    memory.offload("parameters")
    reference.offload()
    assert kept == [{}, {}]


def test_the_weights_of_a_reference_are_copied_to_the_host_once(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    to_host = offload._to_host

    def counted(storage: torch.UntypedStorage) -> list[torch.Tensor]:
        copied.append(storage.nbytes())
        return to_host(storage)

    monkeypatch.setattr(offload, "_to_host", counted)
    reference = MegatronReference(EngineConfig(path=str(checkpoints("qwen3", tied=True))))
    reference.initialize()
    parameters = list(reference.modules[0].parameters())
    expected, sizes = reference.compute_logp(texts(0)), [p.untyped_storage().nbytes() for p in parameters]
    for _ in range(3):
        reference.offload()
        reference.offload()
        assert {p.untyped_storage().nbytes() for p in parameters} == {0}
        assert torch.equal(reference.compute_logp(texts(0)), expected)
    assert sorted(copied) == sorted(sizes)


def test_views_of_one_storage_are_freed_once_and_come_back() -> None:
    base = torch.arange(12.0)
    halves = [base[:6], base[6:]]
    rest = Offloaded([*halves, base])
    assert rest.nbytes == 48
    assert base.untyped_storage().nbytes() == 0
    rest.restore()
    assert torch.equal(base, torch.arange(12.0))
    assert halves[1].tolist() == [6, 7, 8, 9, 10, 11]
    dropped = Offloaded([base], keep=False)
    dropped.restore()
    assert not base.any()


@pytest.mark.parametrize("nbytes", [1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 5, 18_146_000_000])
def test_pinned_memory_is_hardly_rounded_up(nbytes: int) -> None:
    """torch's allocator gives each block the next power of two (ATen/core/CachingHostAllocator.h)."""
    sizes = pinned_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert sum(1 << (size - 1).bit_length() for size in sizes) < nbytes + LEAST_PIECE


def test_a_storage_of_several_pieces_comes_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_PIECE", 16)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 16, 100, 1000)]
    before = [tensor.clone() for tensor in tensors]
    given_up = Offloaded(tensors)
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 4
    assert given_up.nbytes == 1117
    given_up.restore()
    assert all(torch.equal(tensor, as_before) for tensor, as_before in zip(tensors, before, strict=True))
