"""Adapters in SGLang's pool: plans from every layout of the trainer, and servers that do not fit are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_configs import config_of
from safetensors.torch import load_file
from torch import Tensor, nn

from megarl.actor.weights.shards import tensor_shapes, world_table
from megarl.families import with_adapters
from megarl.families.adapters import MANAGER, SERVED, Adapters, is_adapter, wire_name
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.reshard.plan.holdings import Holdings, Topology
from megarl.reshard.plan.megatron_layout import source_holdings
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.sglang_adapters import HELD, adapter_buffers, adapter_holdings
from megarl.reshard.plan.sglang_layout import Geometry
from megarl.reshard.sync.live_adapters import live_adapters
from megarl.reshard.sync.live_parameters import LayoutError
from megarl.rollout.servers.served_adapters import LINEAR, ServedAdapters, check_held

RANK = 4
WIDE, NARROW = Adapters(RANK, ("all-linear",)), Adapters(RANK, ("v_proj", "layers.1.mlp.up_proj"))


PAIR = ("math", "code")
HELD_FACTS = {
    "lora_paths": [{"lora_name": name, "lora_path": f"/logs/scale_0.25/{name}"} for name in PAIR],
    "max_lora_rank": 4,
    "lora_target_modules": ["v_proj", "up_proj"],
}


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


def test_a_plan_of_several_adapters_has_the_boxes_of_each_and_as_many_times_the_bytes() -> None:
    model, parallel = model_of(), ParallelConfig(tp_size=2, pp_size=2, sequence_parallel=True)
    one = source_holdings(world_table(with_adapters(model, NARROW), parallel), "float32")
    topology = Topology.of_sizes(parallel.world_size(), [2], 8)
    alone = plan(one, adapter_holdings(model, NARROW, tp_size=2, dtype="float32"), topology, 4096)
    made = plan(
        one.of_adapters(PAIR), adapter_holdings(model, NARROW, PAIR, tp_size=2, dtype="float32"), topology, 4096
    )
    assert alone.destinations.names == alone.destinations.of_adapters([SERVED]).names
    assert made.bytes_in.tolist() == (2 * alone.bytes_in).tolist()
    assert made.destinations.names == tuple(f"{name}/{box}" for name in PAIR for box in alone.destinations.names)
    for held in (made.sources, made.destinations):
        single = alone.sources if held is made.sources else alone.destinations
        for rank in range(2):
            boxes = [boxes_of(side, rank) for side in (held, single)]
            assert boxes[0] == [(wire_name(name, box), *rest) for name in PAIR for box, *rest in boxes[1]]


def boxes_of(side: Holdings, rank: int) -> list[tuple[str, list[int], list[int]]]:
    """Name, start and stop of each row of a rank."""
    rows = side.rows_of(rank)
    return [(side.names[side.tensor[row]], side.start[row].tolist(), side.stop[row].tolist()) for row in rows]


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


def served(
    adapters: Adapters = WIDE,
    tp_size: int = 1,
    rank: int = RANK,
    pinned: bool = True,
    names: tuple[str, ...] = (SERVED,),
) -> nn.Module:
    """A model with SGLang's manager of adapters, as a server has it, for adapters in slots 1 and on."""
    geometry, pools = Geometry.of(model_of(), 0, tp_size), ({}, {})  # type: ignore[var-annotated]
    for rule in adapter_buffers(geometry, Adapters(rank, ("all-linear",))):
        pool = pools["lora_B" in rule.name]
        pool.setdefault(rule.name.split(".")[-3], []).append(torch.ones(1 + len(names), *rule.shape))
    ids = {name: f"id of {name}" for name in names}
    config = SimpleNamespace(r=adapters.rank, target_modules=list(LINEAR))
    model = nn.Module()
    manager = SimpleNamespace(
        lora_refs={ids[name]: SimpleNamespace(lora_name=name, pinned=pinned or name == "math") for name in names},
        configs=dict.fromkeys(ids.values(), config),
        memory_pool=SimpleNamespace(
            uid_to_buffer_id={ids[name]: slot for slot, name in enumerate(names, 1)},
            A_buffer=pools[0],
            B_buffer=pools[1],
        ),
    )
    setattr(model, MANAGER, manager)
    return model


def test_the_slot_is_cleared_and_the_other_slots_stay() -> None:
    model = served()
    geometry = Geometry.of(model_of(), 0, 1)
    fragments = list(live_adapters(model, geometry))
    buffers = pool_of(model)
    for buffer in buffers:
        assert buffer[0].all()
        assert not buffer[1].any()
    for number, fragment in enumerate(fragments, 1):
        fragment.view.fill_(number)
    assert sum(f.view.numel() for f in fragments) == sum(int(buffer[1].count_nonzero()) for buffer in buffers)
    assert list(live_adapters(nn.Module(), geometry)) == []


def pool_of(model: nn.Module) -> list[Tensor]:
    pool = getattr(model, MANAGER).memory_pool
    return [buffer for half in (pool.A_buffer, pool.B_buffer) for layers in half.values() for buffer in layers]


def test_each_adapter_has_its_own_slot_under_its_own_names() -> None:
    model, geometry = served(names=PAIR), Geometry.of(model_of(), 0, 1)
    alone = [fragment.box.name for fragment in live_adapters(served(), geometry)]
    fragments = list(live_adapters(model, geometry))
    assert [fragment.box.name for fragment in fragments] == [f"{name}/{box}" for name in PAIR for box in alone]
    assert all(is_adapter(fragment.box.name) for fragment in fragments)
    for fragment in fragments:
        fragment.view.fill_(5 + PAIR.index(fragment.box.name.split("/")[0]))
    assert {(slot, value) for b in pool_of(model) for slot in (1, 2) for value in b[slot].unique().tolist()} == {
        (1, 5.0),
        (2, 6.0),
    }


@pytest.mark.parametrize(
    ("knobs", "tp_size", "message"),
    [
        ({"pinned": False}, 1, "keeps its adapter trained in no slot of its own; start it by megarl.serve"),
        ({"pinned": False, "names": PAIR}, 1, "keeps its adapter code in no slot of its own; start it by megarl.serve"),
        ({"rank": 8}, 1, r"holds model.*qkv_proj.lora_A.weight as \[24, 32\] on rank 0 of 1, .* say \[12, 32\]"),
        ({"rank": 8, "names": PAIR}, 1, r"holds math/model.*qkv_proj.lora_A.weight as \[24, 32\] on rank 0 of 1"),
        ({"tp_size": 2}, 1, r"qkv_proj.lora_B.weight as \[24, 4\] on rank 0 of 1, .* say \[48, 4\]"),
    ],
)
def test_a_pool_that_differs_from_the_rules_is_refused(knobs: dict[str, Any], tp_size: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        list(live_adapters(served(**knobs), Geometry.of(model_of(), 0, tp_size)))


def test_a_server_starts_with_adapters_without_tensors_and_the_trained_ones_scale(tmp_path: Path) -> None:
    shape = Adapters(9, ("layers.0.self_attn.q_proj", "up_proj"), 6.0, True)
    arguments = ServedAdapters(shape, PAIR).arguments(tmp_path)
    assert arguments["lora_target_modules"] == ["q_proj", "up_proj"]
    assert arguments["max_loras_per_batch"] == 3, "SGLang pins all slots but one"
    entries = [json.loads(text) for text in arguments["lora_paths"]]
    assert [(entry["lora_name"], entry["pinned"]) for entry in entries] == [("math", True), ("code", True)]
    folders = {Path(entry["lora_path"]) for entry in entries}
    assert len(folders) == 2, "SGLang tells adapters apart by name and path"
    for folder in folders:
        document = json.loads((folder / "adapter_config.json").read_text())
        assert document["lora_alpha"] / document["r"] == pytest.approx(6.0 / 3)
        assert load_file(folder / "adapter_model.safetensors") == {}


@pytest.mark.parametrize(
    ("facts", "shape", "names", "message"),
    [
        ({"lora_paths": None}, WIDE, (SERVED,), "127.0.0.1:1 lacks the run's adapters trained; start it by"),
        ({"lora_paths": []}, None, (), None),
        (HELD_FACTS, NARROW, PAIR, None),
        (HELD_FACTS, NARROW, ("code", "math"), None),
        (HELD_FACTS, NARROW, ("math", "code", "law", "art"), "lacks the run's adapters art, law; start it by"),
        (HELD_FACTS, NARROW, ("code", "law"), "holds adapters that are not the run's: math; start it by"),
        (
            HELD_FACTS | {"max_lora_rank": 3},
            NARROW,
            PAIR,
            "holds adapters of rank 3, scale 0.25, on up_proj, v_proj, and the run's are of rank 4, scale 0.25, on ",
        ),
        (
            HELD_FACTS,
            WIDE,
            PAIR,
            "rank 4, scale 0.25, on up_proj, v_proj, and the run's are of rank 4, scale 0.25, on down_proj",
        ),
        (
            HELD_FACTS,
            dataclasses.replace(NARROW, alpha=8.0),
            PAIR,
            "rank 4, scale 0.25, on up_proj, v_proj, and the run's are of rank 4, scale 2, on up_proj",
        ),
        (HELD_FACTS, None, (), "holds adapters that are not the run's: code, math; start it by"),
    ],
)
def test_servers_of_other_adapters_are_refused(
    facts: dict[str, Any], shape: Adapters | None, names: tuple[str, ...], message: str | None
) -> None:
    adapters = None if shape is None else ServedAdapters(shape, names)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_held(facts, adapters, "127.0.0.1:1")
