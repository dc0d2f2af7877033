"""Shard table: complete, without overlap, equal on replicas, for every family and layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig, Qwen3MoeConfig

from megarl.actor.checks import check_layout
from megarl.actor.weights.shard_spec import ShardSpec
from megarl.actor.weights.shards import shard_specs, tensor_shapes, world_table
from megarl.families import as_scalar, decoder, padded_vocab_size
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import places
from tests.conftest import FAMILY_CONFIGS, random_model

QWEN3_235B = Qwen3MoeConfig(
    hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
    intermediate_size=12288, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp_size": 2, "sequence_parallel": True},
    {"tp_size": 4, "sequence_parallel": True},  # more ranks than key heads
    {"pp_size": 2, "vpp_size": 2, "dp_size": 2},
    {"pp_size": 3, "first_stage_layers": 1, "last_stage_layers": 1, "cp_size": 2},
    {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "cp_size": 2, "dp_size": 2},
]
EXPERT_LAYOUTS: list[dict[str, Any]] = [
    {"dp_size": 4, "ep_size": 4},
    {"dp_size": 4, "ep_size": 2, "etp_size": 2},
    {"tp_size": 2, "sequence_parallel": True, "dp_size": 2, "ep_size": 4, "etp_size": 1},
    {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "vpp_size": 2, "cp_size": 2, "ep_size": 2},
]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tied": True, "attention_bias": True},
    "mistral": {"family": "mistral", "tied": False},
    "mixtral": {"family": "mixtral", "tied": False},
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen3": {"family": "qwen3", "tied": True},
    "qwen3_moe": {"family": "qwen3_moe", "tied": True, "mlp_only_layers": [1]},
}
CASES = [
    (name, layout) for name in MODELS for layout in LAYOUTS + (EXPERT_LAYOUTS if "mix" in name or "moe" in name else [])
]


def model_of(name: str) -> torch.nn.Module:
    return random_model(**{**MODELS[name], "num_hidden_layers": 4})


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tensors(name)` returns the model's config and its tensors on disk."""
    cache: dict[str, tuple[PretrainedConfig, dict[str, torch.Tensor]]] = {}

    def get(name: str) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
        if name not in cache:
            folder = tmp_path_factory.mktemp(name)
            model = model_of(name)
            model.save_pretrained(folder)
            cache[name] = (model.config, load_file(folder / "model.safetensors"))
        return cache[name]

    return get


def native_parameters(specs: list[ShardSpec], tensors: dict[str, torch.Tensor]) -> dict[tuple[int, str], torch.Tensor]:
    """Builds the parameters of a rank from its shards. Elements outside all shards are NaN."""
    extents: dict[tuple[int, str], list[int]] = {}
    for spec in specs:
        ends = [p + b - a for p, a, b in zip(spec.at, spec.start, spec.stop, strict=True)]
        old = extents.setdefault((spec.stage, spec.param), ends)
        extents[spec.stage, spec.param] = [max(pair) for pair in zip(old, ends, strict=True)]
    params = {key: torch.full(shape, math.nan) for key, shape in extents.items()}
    for spec in specs:
        view = params[spec.stage, spec.param][spec.index]
        assert view.isnan().all(), f"{spec} overlaps another"
        view.copy_(tensors[spec.name][tuple(map(slice, spec.start, spec.stop))])
    return params


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_element_lies_once_in_every_replica(name: str, layout: dict[str, Any], tensors: Any) -> None:
    config, stored = tensors(name)
    parallel = ParallelConfig(**layout)
    check_layout(config, parallel)
    for place in places(parallel):
        specs = shard_specs(config, parallel, place)
        assert all(not param.isnan().any() for param in native_parameters(specs, stored).values())
    shapes = tensor_shapes(config)
    assert {n: tuple(t.shape) for n, t in stored.items()} == shapes
    table = world_table(config, parallel)
    assert sorted(table.names) == sorted(shapes)
    distinct = {
        (table.names[t], *s, *e): math.prod(b - a for a, b in zip(s, e, strict=True))
        for t, s, e in zip(table.tensor, table.start.tolist(), table.stop.tolist(), strict=True)
    }
    for tensor, shape in shapes.items():
        assert sum(n for key, n in distinct.items() if key[0] == tensor) == math.prod(shape), tensor


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_arrays_of_a_world_are_the_shards_of_its_ranks(name: str, layout: dict[str, Any], tensors: Any) -> None:
    config, _ = tensors(name)
    parallel = ParallelConfig(**layout)
    table = world_table(config, parallel)
    for rank, place in enumerate(places(parallel)):
        sets = [i for i, ranks in enumerate(table.holders) if rank in ranks]
        rows = np.flatnonzero(np.isin(table.holder, sets))
        expected = [
            (p.name, (*p.shape, 1)[:2], (*p.start, 0)[:2], (*p.stop, 1)[:2])
            for p in shard_specs(config, parallel, place)
        ]
        assert [
            (table.names[table.tensor[row]], *(tuple(a[i].tolist()) for a, i in columns))
            for row in rows
            for columns in [((table.shape, table.tensor[row]), (table.start, row), (table.stop, row))]
        ] == expected


def test_a_query_group_that_tp_cuts_is_held_in_parts() -> None:
    config = FAMILY_CONFIGS["llama"](
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1
    )
    parallel = ParallelConfig(tp_size=4)
    by_rank = [[(p.name.split(".")[-2], p) for p in shard_specs(config, parallel, place)] for place in places(parallel)]
    rows = [
        [(part, p.start[0], p.stop[0], p.at[0]) for part, p in rank if part in ("q_proj", "k_proj", "v_proj")]
        for rank in by_rank
    ]
    assert rows == [
        [("q_proj", 0, 32, 0)],
        [("k_proj", 0, 16, 0), ("v_proj", 0, 16, 16)],
        [("q_proj", 32, 64, 0)],
        [("k_proj", 16, 32, 0), ("v_proj", 16, 32, 16)],
    ]


def test_a_value_head_takes_the_place_of_the_vocabulary() -> None:
    config = as_scalar(FAMILY_CONFIGS["qwen3"](num_hidden_layers=2, tie_word_embeddings=True))
    shapes = tensor_shapes(config)
    assert shapes["score.weight"] == (1, config.hidden_size)
    assert "lm_head.weight" not in shapes


def test_a_rank_with_nothing_but_padding_of_the_vocabulary_holds_none_of_it() -> None:
    config = FAMILY_CONFIGS["llama"](
        vocab_size=9, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1
    )
    parallel = ParallelConfig(tp_size=4)
    assert padded_vocab_size(config, 4) == 32
    counts = [
        sum(p.name == "lm_head.weight" for p in shard_specs(config, parallel, place)) for place in places(parallel)
    ]
    assert counts == [1, 1, 0, 0]


def test_a_thousand_ranks_of_a_235b_mixture_are_described_from_the_config_alone() -> None:
    parallel = ParallelConfig(
        tp_size=4, pp_size=8, cp_size=2, dp_size=16, ep_size=16, etp_size=1, sequence_parallel=True,
        first_stage_layers=11, last_stage_layers=11,
    )  # fmt: skip
    check_layout(QWEN3_235B, parallel)
    table = world_table(QWEN3_235B, parallel)
    assert sum(math.prod(shape) for shape in tensor_shapes(QWEN3_235B).values()) == 235_093_634_560
    assert {rank for ranks in table.holders for rank in ranks} == set(range(1024))
    model = decoder(QWEN3_235B)
    assert model.experts is not None
    experts = ["experts" in table.names[t] for t in table.tensor]
    assert (
        sum(experts) == model.experts.count * sum(model.sparse) * 3
    )  # each matrix of each expert once, because etp is 1
