"""`parallel.tp_comm_overlap`: what it is refused for, and microbatches of one size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import refusal
from transformers import LlamaConfig

from megarl.actor.batch.context_parallel import Cut
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.gpu import userbuffers
from megarl.actor.sizes.memory import StepLoad, trainer_memory
from megarl.checks import config_checks, failures
from megarl.config import ClusterConfig, Config
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of

MODEL = LlamaConfig(
    num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2
)
ON: dict[str, Any] = {"tp_size": 2, "sequence_parallel": True, "tp_comm_overlap": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_parallel": False}, "parallel.tp_comm_overlap=true needs parallel.sequence_parallel=true"),
        ({"cp_size": 2}, "pads whole sequences, and parallel.cp_size=2 cuts them"),
    ],
)
def test_layouts_without_whole_sequences_over_tp_are_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: ParallelConfig(**{**ON, **changes}).check())
    ParallelConfig(**ON).check()


@pytest.mark.parametrize(
    ("fields", "deterministic", "message"),
    [
        ({"backend": "torch"}, False, "or actor.backend=torch to te"),
        ({"dtype": "float32"}, False, "actor.dtype=float32 to bfloat16"),
        ({"shared_prefix": True}, False, "works in Transformer Engine's layers"),
        ({}, True, "works in Transformer Engine's layers"),
        ({"fp8": "blockwise"}, False, "and actor.fp8=blockwise; set one of them to"),
    ],
)
def test_other_layers_are_refused(fields: dict[str, Any], deterministic: bool, message: str) -> None:
    config = EngineConfig(**{"dtype": "bfloat16", **fields})
    assert message in refusal(lambda: userbuffers.check_knobs(config, ParallelConfig(**ON), deterministic))
    userbuffers.check_knobs(config, ParallelConfig(), deterministic)


def test_a_machine_without_transformer_engine_is_refused() -> None:
    assert "was not found" in refusal(lambda: userbuffers.check_device(ParallelConfig(**ON), False, None, {}))
    userbuffers.check_device(ParallelConfig(**ON), True, (9, 0), {})
    userbuffers.check_device(ParallelConfig(), False, None, {})


def test_gpus_without_multicast_are_refused() -> None:
    """Transformer Engine asserts it when the buffers are made (module/base.py:158)."""
    message = refusal(lambda: userbuffers.check_device(ParallelConfig(**ON), True, (8, 0), {}))
    assert "needs CUDA multicast, and this machine's GPUs have compute capability 8.0; set the variable" in message
    userbuffers.check_device(ParallelConfig(**ON), True, (8, 0), {"UB_SKIPMC": "1"})
    userbuffers.check_device(ParallelConfig(), True, (8, 0), {})


def test_tensor_parallel_groups_over_nodes_are_refused() -> None:
    parallel = ParallelConfig(**{**ON, "tp_size": 16, "dp_size": 1})
    config = Config(parallel=parallel, actor=EngineConfig(dtype="bfloat16"), cluster=ClusterConfig(gpus_per_node=8))
    message = "stays on one machine, and parallel.tp_size=16 exceeds cluster.gpus_per_node=8"
    assert any(message in text for text in failures(config_checks(config)))
    alone = dataclasses.replace(config, cluster=ClusterConfig(gpus_per_node=16))
    assert not any("stays on one machine, and parallel.tp" in text for text in failures(config_checks(alone)))


@pytest.mark.parametrize("lengths", [[5, 33, 2], [1], [64], [7] * 9])
def test_every_microbatch_has_the_same_number_of_tokens(lengths: list[int]) -> None:
    padded = Cut(token_multiple=2, fixed_tokens=64).padded_cu_seqlens(cu_seqlens_of(torch.tensor(lengths)))
    assert padded[: len(lengths) + 1].tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert int(padded[-1]) == 64
    assert int(padded.diff().max()) == max(lengths), "padding makes no sequence longer"
    assert int(padded.diff().min()) > 0


def test_sequences_of_padding_change_no_log_prob(checkpoints: Callable[..., Path]) -> None:
    engine = MegatronEngine(EngineConfig(path=str(checkpoints("qwen3", tied=True)), max_tokens_per_mb=40))
    engine.initialize()
    lengths = torch.tensor([9, 21, 14])
    batch = PackedBatch(cu_seqlens_of(lengths), {"input_ids": torch.arange(44) % 300})
    plain = engine.eval().logprobs(batch)
    engine._cut = Cut(fixed_tokens=40)
    torch.testing.assert_close(engine.logprobs(batch), plain, atol=1e-5, rtol=0)
    engine.destroy()


def test_buffers_of_every_collective_and_padded_microbatches_take_memory() -> None:
    """12 buffers of a microbatch in bfloat16, whose activations are those of 4096 tokens and not of 1024."""
    config = EngineConfig(dtype="bfloat16", max_tokens_per_mb=4096)
    off = replace(ParallelConfig(**ON), tp_comm_overlap=False)
    short, full = StepLoad(1024, 2), StepLoad(4096, 2)
    padded = trainer_memory(MODEL, ParallelConfig(**ON), config, short, 0, on_gpu=True)
    plain = trainer_memory(MODEL, off, config, full, 0, on_gpu=True)
    assert padded.userbuffers == 12 * 4096 * MODEL.hidden_size * 2
    assert replace(padded, userbuffers=0) == plain
    assert padded.total == plain.total + padded.userbuffers
