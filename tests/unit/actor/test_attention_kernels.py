"""Models whose packed sequences no kernel of Transformer Engine takes are refused in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import refusal
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from megarl import checks, cli
from megarl.actor import engine
from megarl.actor.checks import device_checks, kernel_checks
from megarl.actor.config import EngineConfig
from megarl.actor.gpu import attention_kernels
from megarl.knobs import run_all
from megarl.parallel import platform
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import OFF
from megarl.trainer.inputs import read_inputs
from megarl.trainer.replay.checks import check_replay
from megarl.types import PackedBatch, cu_seqlens_of

TE = EngineConfig(dtype="bfloat16", backend="te")
LONG, SHORT = 16384, attention_kernels.UNFUSED_TOKENS  # tokens of the longest sequence
QWEN, GEMMA, SINKS, LATENT = Qwen3Config(head_dim=128), Gemma3TextConfig(), GptOssConfig(), DeepseekV3Config()
HUGE = Qwen3Config(head_dim=512)

# model, compute capability, flash-attn is installed, what cuDNN and flash-attn lack; "" for an accepted one
ROWS: list[tuple[PretrainedConfig, tuple[int, int], bool, str]] = [
    (QWEN, (7, 5), True, "cuDNN's takes packed sequences from 9.0 on and flash-attn needs 8.0"),
    (QWEN, (8, 0), False, "cuDNN's takes packed sequences from 9.0 on and flash-attn is not installed"),
    (QWEN, (8, 0), True, ""),
    (QWEN, (8, 9), False, "cuDNN's takes packed sequences from 9.0 on and flash-attn is not installed"),
    (QWEN, (9, 0), False, ""),
    (QWEN, (10, 0), False, ""),
    (QWEN, (12, 0), False, "cuDNN's takes no packed sequences and flash-attn is not installed"),
    (QWEN, (12, 0), True, ""),
    (QWEN, (12, 1), False, ""),
    (LATENT, (8, 0), False, "heads of 192, and on this GPU of compute capability 8.0 cuDNN's takes packed sequences"),
    (LATENT, (8, 9), True, ""),
    (LATENT, (9, 0), False, ""),
    (LATENT, (10, 0), False, "cuDNN's trains heads of at most 128 and flash-attn is not installed"),
    (LATENT, (10, 3), True, ""),
    (GEMMA, (8, 0), True, ""),
    (GEMMA, (8, 9), True, "cuDNN's takes packed sequences from 9.0 on and flash-attn takes heads of at most 192"),
    (GEMMA, (9, 0), False, ""),
    (GEMMA, (10, 0), True, ""),
    (GEMMA, (10, 3), True, "cuDNN's trains heads of at most 128 and flash-attn takes heads of at most 192"),
    (Qwen3NextConfig(), (10, 0), False, "heads of 256, and on this GPU of compute capability 10.0 cuDNN's trains"),
    (SINKS, (8, 0), True, "heads of 64 with sinks, and on this GPU of compute capability 8.0 cuDNN's takes packed"),
    (SINKS, (9, 0), False, ""),
    (SINKS, (10, 0), False, ""),
    (SINKS, (12, 0), True, "cuDNN's takes no packed sequences and flash-attn has no sinks"),
    (HUGE, (9, 0), True, "cuDNN's trains heads of at most 256 and flash-attn takes heads of at most 256"),
]


def machine(patch: pytest.MonkeyPatch, capability: tuple[int, int] | None, flash: bool, te: bool = True) -> None:
    answers = {
        "takes_gpu_options": True,
        "has_transformer_engine": te,
        "compute_capability": capability,
        "has_flash_attention": flash,
    }
    for name, answer in answers.items():
        patch.setattr(platform, name, lambda answer=answer: answer)


@pytest.mark.parametrize(("model", "capability", "flash", "message"), ROWS)
@pytest.mark.parametrize("cp_size", [1, 2])
def test_models_that_no_kernel_takes_are_refused(
    model: PretrainedConfig, capability: tuple[int, int], flash: bool, message: str, cp_size: int
) -> None:
    def check() -> None:
        attention_kernels.check_kernels(ParallelConfig(cp_size=cp_size), model, True, capability, flash, LONG)

    if not message:
        check()
        return
    line = refusal(check)
    assert message in line
    assert line.startswith("sequences of up to 16384 tokens need" if cp_size == 1 else "parallel.cp_size=2 needs")
    assert ("; install it, or set actor.backend=torch" in line) == ("flash-attn is not installed" in line)
    assert ("so all their scores would be stored" in line) == (cp_size == 1)
    assert line.endswith(" gconfig.max_new_tokens)" if cp_size == 1 else "set actor.backend=torch")


def test_short_sequences_may_store_their_scores_unless_they_are_cut() -> None:
    arguments = QWEN, True, (8, 0), False
    for longest in (None, SHORT):
        attention_kernels.check_kernels(ParallelConfig(), *arguments, longest)
    for parallel, longest in ((ParallelConfig(), SHORT + 1), (ParallelConfig(cp_size=2), SHORT)):
        refusal(lambda two=(parallel, longest): attention_kernels.check_kernels(two[0], *arguments, two[1]))


def test_log_probs_alone_take_heads_of_any_size_on_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, (10, 0), flash=False)
    run_all(kernel_checks(TE, ParallelConfig(), LATENT, longest=LONG, trains=False))
    assert "trains heads" in refusal(lambda: run_all(kernel_checks(TE, ParallelConfig(), LATENT, longest=LONG)))


@pytest.mark.parametrize(
    ("fields", "capability", "te", "is_refused"),
    [
        ({"backend": "te"}, (8, 0), True, True),
        ({"backend": "auto"}, (8, 0), True, True),
        ({"backend": "auto"}, (8, 0), False, False),
        ({"backend": "torch"}, (8, 0), True, False),
        ({"backend": "auto", "dtype": "float32"}, (8, 0), True, False),
        ({"backend": "te"}, None, True, False),
    ],
)
def test_only_layers_of_transformer_engine_on_a_gpu_are_judged(
    fields: dict[str, Any],
    capability: tuple[int, int] | None,
    te: bool,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, capability, flash=False, te=te)
    listed = kernel_checks(EngineConfig(**{"dtype": "bfloat16", **fields}), ParallelConfig(), QWEN, longest=LONG)
    assert len(checks.failures(listed)) == is_refused


@pytest.mark.parametrize("trainable", [True, False])
def test_an_engine_is_refused_before_its_layers_are_built(
    trainable: bool, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, (8, 0), flash=False)
    asked, listed = [], kernel_checks
    monkeypatch.setattr(
        engine, "kernel_checks", lambda *of_model, trains: asked.append(trains) or listed(*of_model, trains=trains)
    )
    config = dataclasses.replace(TE, path=str(checkpoints("qwen3", tied=True)))
    line = refusal(lambda: engine.MegatronEngine(config, ParallelConfig(cp_size=2), trainable=trainable))
    assert "heads of 16, and on this GPU of compute capability 8.0" in line
    assert asked == [trainable]


def test_a_run_and_a_replay_are_refused_before_data_is_read(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, (8, 0), flash=False)
    knobs = [
        "+experiment=gsm8k_sft",
        "train_dataset.max_length=4096",
        "actor.dtype=bfloat16",
        f"actor.path={checkpoints('qwen3', tied=True)}",
    ]
    config = cli.composed(knobs)
    assert "and on this GPU of compute capability 8.0" in refusal(lambda: read_inputs(config, rank=0))
    nothing = PackedBatch(cu_seqlens_of(torch.tensor([3])), {})
    assert "and on this GPU of compute cap" in refusal(lambda: check_replay(config, config, nothing, None))


def test_a_head_node_without_the_ranks_gpus_judges_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, (8, 0), flash=False)
    monkeypatch.delenv("RANK", raising=False)
    config = cli.composed(
        ["+experiment=gsm8k_sft", "train_dataset.max_length=4096", "actor.dtype=bfloat16", "launcher=ray"]
    )
    assert checks.failures(checks.kernel_checks(config, QWEN)) == []
    monkeypatch.setenv("RANK", "0")
    assert len(checks.failures(checks.kernel_checks(config, QWEN))) == 1


@pytest.mark.parametrize("name", ["NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"])
def test_variables_that_choose_a_kernel_are_refused_where_megatron_would_stop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    listed = device_checks(EngineConfig(), ParallelConfig(), OFF)
    run_all(listed)
    for value in ("0", ""):
        monkeypatch.setenv(name, value)
        line = refusal(lambda: run_all(listed))
        assert line.startswith(f"{name}={value} forbids or forces an attention kernel, and Megatron-core takes 1")
        assert line.endswith(f"; unset {name}")
