"""The load and the memory that preflight plans with."""

from __future__ import annotations

import pytest
from transformers import Qwen3MoeConfig

from megarl import cli
from megarl.actor.sizes.memory import StepLoad
from megarl.families import read_config
from megarl.preflight import sizing
from megarl.preflight.shapes import folder_of
from megarl.preflight.sizing import (
    RouteBytes,
    beside_actor,
    load_of,
    memory_of,
    routes_of,
    server_memory_of,
    synced_server_of,
)


def test_a_microbatch_of_mixed_lengths_may_be_full() -> None:
    """Seven sequences of 4608 tokens leave room in a microbatch of 32768, which shorter ones fill."""
    assert load_of(cli.composed(["+experiment=grpo_70b", "actor.max_tokens_per_mb=32768"])).tokens == 32768


LORA = ("+experiment=gsm8k_grpo", "actor.lora.rank=4")
ALONE = (*LORA, "actor.lora.sync=adapters")
SEVERAL = (*ALONE, "+adapters={a:[],b:[],c:[]}")
# Elements of a layer, of adapters of rank 4: A and B of q, k, v; of o; of gate and up; of down.
ON_ONE = 4 * (3 * 64 + 128 + 64 + 64 + 2 * 64 + 384 + 192 + 64)
ON_TWO = 4 * (3 * 64 + 64 + 32 + 64 + 2 * 64 + 192 + 96 + 64)


@pytest.mark.parametrize(
    ("overrides", "slots", "elements"),
    [(LORA, 0, 0), (ALONE, 2, ON_ONE), (SEVERAL, 4, ON_ONE), ((*SEVERAL, "server.tp_size=2"), 4, ON_TWO)],
)
def test_a_server_has_a_slot_for_each_adapter_and_one_for_none(
    overrides: tuple[str, ...], slots: int, elements: int
) -> None:
    config = cli.load([*overrides])
    memory = synced_server_of(config, read_config(config.actor.path))
    layers, float32 = 2, 4
    assert memory.adapters == slots * layers * elements * float32
    assert memory.total == memory.weights + memory.kv_cache + memory.adapters + memory.staging
    assert memory.staging == 2 * 64 * 2**20


def test_the_slots_leave_less_for_the_cache() -> None:
    on_gpu = ("cluster.gpus_per_node=8", "cluster.gpu_memory_gib=0.01", "server.max_total_tokens=0")
    merged, alone = (cli.load([*knobs, *on_gpu]) for knobs in (LORA, ALONE))
    model = read_config(merged.actor.path)
    before, after = server_memory_of(merged, model), server_memory_of(alone, model)
    assert before.kv_cache - after.kv_cache == pytest.approx(after.adapters, abs=before.kv_cache / 1000)


def test_further_adapters_have_weights_gradients_and_optimizer_of_their_own() -> None:
    config = cli.load([*SEVERAL])
    model = read_config(config.actor.path)
    stages = memory_of(config, model)
    trained, weight, gradient, moments = 2 * ON_ONE, 4, 4, 8
    assert beside_actor(config, model, stages)[0]["other adapters"] == 2 * trained * (weight + gradient + moments)
    assert "other adapters" not in beside_actor(cli.load([*ALONE]), model, stages)[0]


def test_replayed_experts_have_their_bytes_on_the_wire_on_hosts_and_on_devices() -> None:
    base = ["+experiment=gsm8k_grpo", "train_dataset.max_length=40", "gconfig.max_new_tokens=60",
            "train_dataset.batch_size=4", "gconfig.n_samples=2", "algorithm.n_minibatches=2",
            "actor.max_tokens_per_mb=1000", "server.max_total_tokens=5000"]  # fmt: skip
    moe = Qwen3MoeConfig(num_hidden_layers=5, mlp_only_layers=[1], num_experts=8, num_experts_per_tok=3)
    off, rollout, proximal = (
        routes_of(cli.composed([*base, f"algorithm.routing_replay={mode}"]), moe)
        for mode in ("off", "rollout", "proximal")
    )
    assert off is None
    sparse, layers, topk, tokens = 4, 5, 3, 4 * 2 * 100
    assert rollout == RouteBytes(
        token=2 * sparse * topk,
        batch=2 * sparse * topk * tokens,
        device=8 * sparse * topk * 1000,
        answer=4 * layers * topk * 100 * 4 // 3,
        server=4 * layers * topk * 5000,
    )
    assert proximal == RouteBytes(rollout.token, rollout.batch, rollout.device, 0, 0)


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [
        (["parallel.tp_size=2"], True),
        (["parallel.tp_size=1"], False),  # free memory decides
        (["parallel.tp_size=1", "deterministic=true"], True),
        (["parallel.tp_size=2", "actor.kept_logits_mb=0"], False),
        (["parallel.tp_size=2", "cluster.gpus_per_node=0"], False),
    ],
)
def test_logits_that_are_kept_whatever_is_free_are_counted(knobs: list[str], kept: bool) -> None:
    """sft_8b's microbatch on two ranks: 8,192 tokens by half of 128,256 logits, and the head's own gradient."""
    base = ["+experiment=sft_8b", "parallel.dp_size=1", "actor.dtype=bfloat16", "actor.max_tokens_per_mb=8192"]
    config = cli.composed([*base, *knobs])
    model = read_config(str(folder_of(config.actor.path)))
    load = StepLoad(8192)
    found = sizing.kept_logits_bytes(config, config.parallel, model, load)
    vocab = 128256 // config.parallel.tp_size
    assert found == (8192 * vocab * 2 + vocab * 4096 * 2 if kept else 0)


def test_at_most_a_32nd_of_the_gpu_is_kept() -> None:
    """A microbatch whose prompts have no labels may keep its logits, though with labels everywhere it would not."""
    knobs = ["+experiment=sft_8b", "parallel.dp_size=1", "parallel.tp_size=2", "cluster.gpu_memory_gib=24"]
    config = cli.composed(knobs)
    model = read_config(str(folder_of(config.actor.path)))
    found = sizing.kept_logits_bytes(config, config.parallel, model, StepLoad(2**16))
    assert found == 24 * 2**30 // 32 + 128256 // 2 * 4096 * 2
