"""Adapters in SGLang's pool: plans from every layout of the trainer, and servers that do not fit are refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_configs import config_of
from safetensors.torch import load_file
from torch import nn

from megarl.actor.weights.shards import tensor_shapes, world_table
from megarl.families import with_adapters
from megarl.families.adapters import MANAGER, SERVED, Adapters
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.reshard.plan.holdings import Topology
from megarl.reshard.plan.megatron_layout import source_holdings
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.sglang_adapters import HELD, adapter_buffers, adapter_holdings
from megarl.reshard.plan.sglang_layout import Geometry
from megarl.reshard.sync.live_adapters import live_adapters
from megarl.reshard.sync.live_parameters import LayoutError
from megarl.rollout.servers import served_adapters

RANK = 4
WIDE, NARROW = Adapters(RANK, ("all-linear",)), Adapters(RANK, ("v_proj", "layers.1.mlp.up_proj"))


HELD_FACTS = {"lora_paths": [{"lora_name": SERVED}], "max_lora_rank": 4, "lora_target_modules": ["v_proj", "up_proj"]}


def model_of(family: str = "llama") -> Any:
    return config_of(family, num_hidden_layers=2)


@pytest.mark.parametrize("adapters", [WIDE, NARROW], ids=["all", "few"])
@pytest.mark.parametrize("family", HELD)
def test_every_element_of_an_adapter_goes_to_the_ranks_that_hold_it_and_nothing_else_goes(
    family: str, adapters: Adapters
) -> None:
    model = model_of(family)
    shapes = tensor_shapes(with_adapters(model, adapters))
    whole = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    for parallel in (ParallelConfig(), ParallelConfig(tp_size=2, pp_size=2, sequence_parallel=True)):
        sources = source_holdings(world_table(with_adapters(model, adapters), parallel), "float32")
        for tp_size in (1, 2, 4):
            held = adapter_holdings(model, adapters, tp_size=tp_size, n_servers=2, dtype="float32")
            topology = Topology.of_sizes(parallel.world_size(), [tp_size] * 2, 8)
            made = plan(sources, held, topology, 4096)
            assert set(made.destinations.names) == set(shapes)
            assert made.bytes_in.tolist() == made.bytes_needed.tolist()
            if tp_size == 1:
                assert made.bytes_in.tolist() == [whole] * 2


def test_parts_without_an_adapter_are_left_out_of_a_stack() -> None:
    (a, b) = (rule for rule in adapter_buffers(Geometry.of(model_of(), 0, 2), Adapters(RANK, ("v_proj",))) if "s.0" in
              rule.name)  # fmt: skip
    assert (a.name, a.shape) == ("model.layers.0.self_attn.qkv_proj.lora_A.weight", (3 * RANK, 32))
    assert [(part.at, part.box.start, part.box.stop) for part in a.parts] == [((2 * RANK, 0), (0, 0), (RANK, 32))]
    assert (b.name, b.shape) == ("model.layers.0.self_attn.qkv_proj.lora_B.weight", (16 + 4 + 4, RANK))
    assert [(part.at, part.box.start, part.box.stop) for part in b.parts] == [((16 + 4, 0), (0, 0), (4, RANK))]


def test_other_families_are_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match="not for qwen3_moe; set it to merged"):
        adapter_holdings(model_of("qwen3_moe"), NARROW, tp_size=1)


def served(adapters: Adapters = WIDE, tp_size: int = 1, rank: int = RANK, pinned: bool = True) -> nn.Module:
    """A model with SGLang's manager of adapters, as a server has it, for one adapter in slot 1 of 2."""
    geometry, pools = Geometry.of(model_of(), 0, tp_size), ({}, {})  # type: ignore[var-annotated]
    for rule in adapter_buffers(geometry, Adapters(rank, ("all-linear",))):
        pool = pools["lora_B" in rule.name]
        pool.setdefault(rule.name.split(".")[-3], []).append(torch.ones(2, *rule.shape))
    ref = SimpleNamespace(lora_name=SERVED, pinned=pinned)
    config = SimpleNamespace(r=adapters.rank, target_modules=list(served_adapters.LINEAR))
    model = nn.Module()
    manager = SimpleNamespace(
        lora_refs={"id": ref},
        configs={"id": config},
        memory_pool=SimpleNamespace(uid_to_buffer_id={"id": 1}, A_buffer=pools[0], B_buffer=pools[1]),
    )
    setattr(model, MANAGER, manager)
    return model


def test_the_slot_is_cleared_and_the_other_slots_stay() -> None:
    model = served()
    geometry = Geometry.of(model_of(), 0, 1)
    fragments = list(live_adapters(model, geometry))
    pool = getattr(model, MANAGER).memory_pool
    for buffers in (*pool.A_buffer.values(), *pool.B_buffer.values()):
        for buffer in buffers:
            assert buffer[0].all()
            assert not buffer[1].any()
    for number, fragment in enumerate(fragments, 1):
        fragment.view.fill_(number)
    buffers = [buffer for pool in (pool.A_buffer, pool.B_buffer) for layers in pool.values() for buffer in layers]
    assert sum(f.view.numel() for f in fragments) == sum(int(buffer[1].count_nonzero()) for buffer in buffers)
    assert list(live_adapters(nn.Module(), geometry)) == []


@pytest.mark.parametrize(
    ("knobs", "tp_size", "message"),
    [
        ({"pinned": False}, 1, "keeps no adapter named trained in a slot of its own; start it by megarl.serve"),
        ({"rank": 8}, 1, r"qkv_proj.lora_A.weight as \[24, 32\] on rank 0 of 1, .* say \[12, 32\]"),
        ({"tp_size": 2}, 1, r"qkv_proj.lora_B.weight as \[24, 4\] on rank 0 of 1, .* say \[48, 4\]"),
    ],
)
def test_a_pool_that_differs_from_the_rules_is_refused(knobs: dict[str, Any], tp_size: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        list(live_adapters(served(**knobs), Geometry.of(model_of(), 0, tp_size)))


def test_a_server_starts_with_an_adapter_without_tensors_and_the_trained_ones_scale(tmp_path: Path) -> None:
    arguments = served_adapters.arguments(Adapters(9, ("layers.0.self_attn.q_proj", "up_proj"), 6.0, True), tmp_path)
    assert arguments["lora_target_modules"] == ["q_proj", "up_proj"]
    (text,) = arguments["lora_paths"]
    folder = Path(json.loads(text)["lora_path"])
    document = json.loads((folder / "adapter_config.json").read_text())
    assert document["lora_alpha"] / document["r"] == pytest.approx(6.0 / 3)
    assert load_file(folder / "adapter_model.safetensors") == {}


@pytest.mark.parametrize(
    ("facts", "adapters", "message"),
    [
        (
            {"lora_paths": None},
            WIDE,
            "no adapter, and actor.lora with sync=adapters has one of rank 4 on down_proj",
        ),
        ({"lora_paths": []}, None, None),
        (HELD_FACTS, NARROW, None),
        (HELD_FACTS | {"max_lora_rank": 3}, NARROW, "holds one of rank 3 on up_proj, v_proj, and .* one of rank 4"),
        (HELD_FACTS, WIDE, "holds one of rank 4 on up_proj, v_proj, and .* of rank 4 on down_proj, .*; start it by"),
        (HELD_FACTS, None, "holds one of rank 4 on up_proj, v_proj, and .* sync=merged has no adapter for it"),
    ],
)
def test_servers_of_another_adapter_are_refused(
    facts: dict[str, Any], adapters: Adapters | None, message: str | None
) -> None:
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        served_adapters.check_held(facts, adapters, "127.0.0.1:1")
