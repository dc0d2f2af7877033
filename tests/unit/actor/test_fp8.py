"""`actor.fp8`: what it is refused for, padding of tokens, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import refusal
from transformers import Qwen3Config

from megarl.actor.batch.context_parallel import Cut
from megarl.actor.checks import check_device, knob_checks, model_checks
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.gpu import fp8
from megarl.actor.sizes.memory import StepLoad, trainer_memory
from megarl.actor.sizes.parameter_counts import elements
from megarl.actor.weights.shards import shard_specs
from megarl.config import Config
from megarl.families import read_config
from megarl.knobs import run_all
from megarl.parallel import platform
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import Place
from megarl.preflight import environment
from megarl.preflight.shapes import folder_of
from megarl.types import PackedBatch, cu_seqlens_of
from megarl.versions import GPUs

SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 3072, "vocab_size": 1000,
}  # fmt: skip
MODEL = Qwen3Config(**SHAPE)


@pytest.mark.parametrize(
    ("fields", "deterministic", "message"),
    [
        ({"backend": "torch"}, False, "runs in Transformer Engine's layers and not with actor.backend=torch"),
        ({"backend": "cpu"}, False, "and not with actor.backend=cpu"),
        ({"shared_prefix": True}, False, "and not with actor.shared_prefix=true"),
        ({}, True, "and not with deterministic=true"),
        ({"experts": "sequential"}, False, "and not with actor.experts=sequential"),
        ({"dtype": "float32"}, False, "quantises bfloat16 layers, and actor.dtype=float32"),
    ],
)
def test_other_layers_are_refused(fields: dict[str, Any], deterministic: bool, message: str) -> None:
    config = EngineConfig(**{"dtype": "bfloat16", "fp8": "mxfp8", **fields})
    assert message in refusal(lambda: fp8.check_knobs(config, deterministic))
    fp8.check_knobs(dataclasses.replace(config, fp8="off"), deterministic)


def test_the_knobs_are_checked_with_the_others() -> None:
    config = EngineConfig(dtype="bfloat16", fp8="blockwise", backend="torch")
    assert "actor.fp8" in refusal(lambda: run_all(knob_checks(config, ParallelConfig())))
    narrow = Qwen3Config(**{**MODEL.to_dict(), "intermediate_size": 3080})
    config = EngineConfig(dtype="bfloat16", fp8="blockwise")
    assert "actor.fp8" in refusal(lambda: run_all(model_checks(config, ParallelConfig(), narrow)))


def test_features_that_ranks_gather_in_blocks_are_whole_blocks() -> None:
    """gpt-oss: 2,880. Transformer Engine 2.12 asserts it in the first pass (`utils.py:450`)."""
    model = Qwen3Config(**{**MODEL.to_dict(), "hidden_size": 2880})
    config = EngineConfig(dtype="bfloat16", fp8="blockwise")
    gathering = ParallelConfig(tp_size=2, sequence_parallel=True)
    message = refusal(lambda: fp8.check_layout(config, gathering, model))
    assert "gathers features in blocks of 128, and the model's hidden_size=2880; set parallel.tp_size=1" in message
    fp8.check_layout(config, gathering, MODEL)
    fp8.check_layout(config, ParallelConfig(), model)
    fp8.check_layout(dataclasses.replace(config, fp8="mxfp8"), gathering, model)


@pytest.mark.parametrize(("tp", "size"), [(4, 0), (8, 1544)])
def test_rows_of_gated_delta_nets_are_multiples_too(tp: int, size: int) -> None:
    """Qwen3-Next-80B-A3B: 12,352 rows of query, key, value, gate, beta and alpha."""
    model = read_config(str(folder_of("Qwen/Qwen3-Next-80B-A3B-Instruct")))
    config, parallel = EngineConfig(dtype="bfloat16", fp8="blockwise"), ParallelConfig(tp_size=tp, etp_size=1)
    if size:
        message = refusal(lambda: fp8.check_layout(config, parallel, model))
        assert f"parallel.tp_size={tp} leaves a rank {size} (rows of a gated delta net)" in message
    else:
        fp8.check_layout(config, parallel, model)


@pytest.mark.parametrize(
    ("recipe", "tp", "size"),
    [
        ("blockwise", 1, 0),
        ("mxfp8", 1, 0),
        ("blockwise", 8, 0),
        ("mxfp8", 8, 0),
        ("mxfp8", 64, 16),
        ("blockwise", 64, 0),
    ],
)
def test_weights_of_a_rank_are_multiples_of_the_block(recipe: str, tp: int, size: int) -> None:
    config, parallel = EngineConfig(dtype="bfloat16", fp8=recipe), ParallelConfig(tp_size=tp)
    if size:
        message = refusal(lambda: fp8.check_layout(config, parallel, MODEL))
        assert (
            f"multiples of 32, and parallel.tp_size={tp} leaves a rank {size} (attention heads x head_dim)" in message
        )
    else:
        fp8.check_layout(config, parallel, MODEL)


@pytest.mark.parametrize(
    ("recipe", "gpu", "cuda", "message"),
    [
        ("blockwise", (8, 9), (13, 0), "needs a GPU of compute capability 9.0 or above, and one here has 8.9"),
        ("blockwise", (9, 0), (12, 8), "needs CUDA 12.9 or above, and torch here has 12.8"),
        ("blockwise", (9, 0), (13, 0), ""),
        ("blockwise", (12, 0), (13, 0), ""),
        ("mxfp8", (9, 0), (13, 0), "compute capability 10.0 or above and below 12.0, and one here has 9.0"),
        ("mxfp8", (10, 3), (13, 0), ""),
        ("mxfp8", (12, 0), (13, 0), "compute capability 10.0 or above and below 12.0, and one here has 12.0"),
        ("off", (7, 0), (12, 1), ""),
    ],
)
def test_gpus_without_the_instructions_are_refused(
    recipe: str, gpu: tuple[int, int], cuda: tuple[int, int], message: str
) -> None:
    config = EngineConfig(fp8=recipe)
    if message:
        assert message in refusal(lambda: fp8.check_gpu(config, gpu, cuda))
    else:
        fp8.check_gpu(config, gpu, cuda)


def test_preflight_notes_a_gpu_here_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(platform, "cuda_version", lambda: (13, 0))
    gpus = GPUs(("NVIDIA H100",), (81559,), "580.65")
    for recipe, notes in (("mxfp8", 1), ("blockwise", 0), ("off", 0)):
        config = Config(actor=EngineConfig(dtype="bfloat16", fp8=recipe))
        findings = environment._of_gpus(config, gpus)
        assert len(findings) == notes
        assert all("actor.fp8=mxfp8 needs a GPU" in finding.text and not finding.stops for finding in findings)
    assert environment._of_gpus(Config(actor=EngineConfig(fp8="mxfp8")), GPUs()) == []


@pytest.mark.parametrize(("has_gpu", "missing"), [(True, "the package"), (False, "a GPU")])
def test_a_machine_without_transformer_engine_is_refused(has_gpu: bool, missing: str) -> None:
    config = EngineConfig(dtype="bfloat16", fp8="blockwise")
    assert f"and {missing} was not found" in refusal(lambda: check_device(config, has_gpu))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_every_ranks_tokens_are_padded_to_the_multiple(cp_size: int) -> None:
    for lengths in ([5, 33, 2], [1], [128, 256], [700, 3]):
        padded = Cut(0, cp_size, 128).padded_cu_seqlens(cu_seqlens_of(torch.tensor(lengths)))
        assert int(padded[-1]) % (128 * cp_size) == 0
        assert 0 <= int(padded[-1]) - sum(lengths) < 128 * cp_size + 2 * cp_size * len(lengths)


def test_padding_changes_no_log_prob(checkpoints: Callable[..., Path]) -> None:
    engine = MegatronEngine(EngineConfig(path=str(checkpoints("qwen3", tied=True)), max_tokens_per_mb=40))
    engine.initialize()
    lengths = torch.tensor([9, 21, 14])
    batch = PackedBatch(cu_seqlens_of(lengths), {"input_ids": torch.arange(44) % 300})
    plain = engine.eval().logprobs(batch)
    engine._cut = Cut(token_multiple=fp8.token_multiple("blockwise"))
    torch.testing.assert_close(engine.logprobs(batch), plain, atol=1e-5, rtol=0)
    engine.destroy()


def test_memory_counts_quantised_copies_and_smaller_inputs() -> None:
    parallel, load = ParallelConfig(tp_size=2), StepLoad(4096)
    memory = {
        name: trainer_memory(MODEL, parallel, EngineConfig(dtype="bfloat16", fp8=name), load, 0, on_gpu=True)
        for name in ("off", "blockwise", "mxfp8")
    }
    matrices = elements([s for s in shard_specs(MODEL, parallel, Place(0, 0, 0, 0, 0, 0, 0)) if ".linear_" in s.param])
    for name in ("blockwise", "mxfp8"):
        copies = memory[name].weights - memory["off"].weights
        assert 2 * matrices < copies < 2.1 * matrices
        inputs = 4 * 4096 * (2 * 1024 + 3072 / 2)  # layers x tokens x elements that linear layers read
        spared = memory["off"].activations - memory[name].activations
        assert 0.9 * inputs < spared < 1.1 * inputs
        assert memory[name].gradients == memory["off"].gradients
