"""Communication and memory traffic of the trainer against figures worked out by hand."""

from __future__ import annotations

import pytest

from megarl import cli
from megarl.families import read_config
from megarl.preflight import report
from megarl.preflight.trainer_time import TrainerTimes, TrainerWork, trainer_times

DENSE = ["+experiment=grpo_70b", "actor.recompute=none"]
EXPERTS = ["+experiment=grpo_moe_235b", "actor.recompute=none"]
TOKENS = 2048 * 2304  # of a step, at half of the longest


def times(*overrides: str) -> TrainerTimes:
    config = cli.composed(list(overrides))
    work = TrainerWork.of(config, read_config(str(report.folder_of(config.actor.path))))
    dp = config.parallel.sizes()["dp_size"]
    return trainer_times(work, config.parallel, dp, config.actor.recompute, config.actor.max_tokens_per_mb)


def test_tensor_parallelism_moves_four_times_a_layers_activations_in_each_pass() -> None:
    found = times(*DENSE, "parallel.cp_size=1").communication
    data = 3 * 20 * 4 * 7 / 8 * TOKENS * 8192 * 2 / 450e9  # log-probs, forward, backward; 20 layers of a stage
    starts = 3 * 4 * 20 * 512 * 2e-5  # 4 optimizer steps of 128 microbatches
    assert found.tp == pytest.approx(data + starts, rel=1e-6)
    assert times(*DENSE, "parallel.cp_size=1", "cluster.gpus_per_node=4").communication.tp > 5 * found.tp


def test_context_parallelism_gathers_keys_and_values() -> None:
    data = 4 * 20 * TOKENS / 2 * 2 * 128 * 2 / 50e9  # backward twice; one KV head of 128 a rank; over the network
    assert times(*DENSE).communication.cp == pytest.approx(data + 4 * 20 * 512 * 2e-5, rel=1e-6)
    assert times(*DENSE, "parallel.cp_size=1").communication.cp == 0


def test_experts_move_a_tokens_vector_to_each_of_them_and_back() -> None:
    near = times(*EXPERTS).communication.ep  # 8 ranks of a node
    tokens = TOKENS / 2 / 4  # dp 2, tp 4
    data = 3 * 10 * 2 * 7 / 8 * tokens * 8 * 4096 * 2 / 450e9
    microbatches = 4 * 72  # 256 sequences of 2304 tokens in 8192
    assert near == pytest.approx(data + 3 * 2 * 10 * microbatches * 2e-5, rel=1e-6)
    assert times(*EXPERTS, "parallel.dp_size=4", "parallel.ep_size=16").communication.ep > near


def test_gradients_and_parameters_cross_the_replicas_once_an_optimizer_step() -> None:
    found = times("+experiment=sft_8b").communication
    by_hand = 3 / 4 * 8.03e9 / 2 * (4 + 2) / 450e9  # 4 replicas of half the model, on one node
    assert found.dp == pytest.approx(by_hand, rel=0.01)
    assert found.pp == found.ep == found.cp == 0


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
