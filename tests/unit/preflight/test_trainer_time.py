"""Compute, launches, memory traffic and bubble of the trainer against figures worked out by hand."""

from __future__ import annotations

import functools

import pytest
from transformers import PretrainedConfig

from megarl import cli
from megarl.config import Config
from megarl.families import read_config
from megarl.preflight import report
from megarl.preflight.roofline import times_of
from megarl.preflight.trainer_time import TrainerTimes
from megarl.preflight.trainer_work import TrainerWork

LAYOUT = ["parallel.tp_size=8", "parallel.pp_size=4", "parallel.vpp_size=1", "parallel.cp_size=2", "parallel.dp_size=1"]
DENSE = ["+experiment=grpo_70b", "actor.recompute=none", "actor.max_tokens_per_mb=9216", *LAYOUT]
EXPERTS = ["+experiment=grpo_moe_235b", "actor.recompute=none"]
TOKENS = 2048 * 2304  # of a step, at half of the longest


@functools.cache
def model_of(*overrides: str) -> tuple[Config, PretrainedConfig]:
    config = cli.composed(list(overrides))
    return config, read_config(str(report.folder_of(config.actor.path)))


@functools.cache
def times(*overrides: str) -> TrainerTimes:
    config, model = model_of(*overrides)
    return times_of(config, TrainerWork.of(config, model))


def test_a_small_model_waits_for_launches_and_for_its_gradients() -> None:
    count, fast = 4 * 256, "cluster.gpu_tflops=100000"  # 512 sequences of 512 tokens, two in a microbatch
    found = times("+experiment=grpo_0_5b", "actor.max_tokens_per_mb=1024", fast)
    launches = count * 24 * 1e-4  # 24 layers
    gradients = count * 0.494e9 * (2 + 8) / (1008e9 * 0.5)  # weights read, float32 gradients read and written
    assert found.update == pytest.approx(launches + gradients, rel=0.01)
    memory = "cluster.gpu_memory_gb_s=100000"
    assert times("+experiment=grpo_0_5b", "actor.max_tokens_per_mb=1024", fast, memory).update == pytest.approx(
        3 * launches, rel=0.01
    )


def test_the_bubble_is_of_the_microbatches_of_an_optimizer_step() -> None:
    assert times(*DENSE).bubble == pytest.approx(3 / 128)
