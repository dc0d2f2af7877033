"""Experts as one module: the numbers, names and states of experts one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.actor.checks import check_device, knob_checks, model_checks
from megarl.actor.config import EngineConfig, OptimizerConfig, groups_experts
from megarl.actor.supervised import MegatronLMEngine
from megarl.families import read_config
from megarl.families.weight_formats import FORMATS
from megarl.knobs import UserError, run_all
from megarl.parallel.config import ParallelConfig
from megarl.reshard.quantised_weights import QuantisedWeights, quantised
from megarl.types import PackedBatch, cu_seqlens_of

LENGTHS = torch.tensor([24, 1, 37])
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "tied": False},
    "qwen3_moe": {"family": "qwen3_moe", "tied": True, "mlp_only_layers": [0], "norm_topk_prob": False},
}


def batch() -> PackedBatch:
    total = int(LENGTHS.sum())
    ids = torch.randint(0, 343, (total,), generator=torch.Generator().manual_seed(0))
    return PackedBatch(cu_seqlens_of(LENGTHS), {"input_ids": ids, "loss_mask": torch.ones(total, dtype=torch.bool)})


def engine_of(folder: Path, experts: str, **knobs: Any) -> MegatronLMEngine:
    config = EngineConfig(path=str(folder), experts=experts, optimizer=OptimizerConfig(lr=1e-2), **knobs)
    engine = MegatronLMEngine(config)
    engine.initialize()
    return engine


def experts_of(engine: MegatronLMEngine) -> set[str]:
    kinds = (SequentialMLP, TEGroupedMLP)
    return {type(m).__name__ for module in engine.modules for m in module.modules() if isinstance(m, kinds)}


def weights_of(engine: MegatronLMEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


ON_CPU = pytest.mark.cpu_options("actor.backend=cpu is for machines without a GPU")


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=ON_CPU)])
@pytest.mark.parametrize("name", MODELS)
def test_grouped_experts_train_as_experts_one_after_another(
    name: str, backend: str, recompute: str, checkpoints: Callable[..., Path]
) -> None:
    """Elements at the end of an expert's rows may be computed by other instructions than in one tensor of all."""
    folder, results = checkpoints(**MODELS[name]), {}
    for experts in ("sequential", "grouped"):
        engine = engine_of(folder, experts, backend=backend, recompute=recompute)
        assert experts_of(engine) == {"TEGroupedMLP" if experts == "grouped" else "SequentialMLP"}
        logprobs = engine.eval().logprobs(batch())
        stats = [engine.train_lm(batch()) for _ in range(2)]
        results[experts] = {"logprobs": logprobs, **weights_of(engine)}, stats
    (one_by_one, expected), (grouped, stats) = results["sequential"], results["grouped"]
    for tensor, value in one_by_one.items():
        torch.testing.assert_close(grouped[tensor], value, atol=1e-6, rtol=0, msg=tensor)
    assert stats[0] == pytest.approx(expected[0], rel=1e-6)
    assert stats[1] == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.usefixtures("world_of_one")
def test_states_and_exports_are_the_same_under_both_names(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """Weights, Adam's moments and the export, bit for bit."""
    folder = checkpoints(**MODELS["qwen3_moe"])
    engines = {experts: engine_of(folder, experts, backend="torch") for experts in ("grouped", "sequential")}
    names = {experts: dict(engine.modules[0].named_parameters()) for experts, engine in engines.items()}
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight7" in names["grouped"]
    assert "decoder.layers.1.mlp.experts.local_experts.7.linear_fc1.weight" in names["sequential"]
    for experts, other in (("grouped", "sequential"), ("sequential", "grouped")):
        engines[experts].train_lm(batch())
        engines[experts].save_state(tmp_path / experts)
        engines[experts].save(tmp_path / f"{experts}_hf")
        engines[other].load_state(tmp_path / experts)
        first, second = (engines[e].snapshot_state().tensors for e in (experts, other))
        assert any(key.startswith("exp_avg_sq:") and ".experts.7." in key for key in first)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
        read = engine_of(tmp_path / f"{experts}_hf", other, backend="torch")
        weights = weights_of(read)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(engines[experts]).items())


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("experts", ["grouped", "sequential"])
def test_experts_are_quantised_where_they_are_as_the_whole_checkpoint(
    experts: str, checkpoints: Callable[..., Path]
) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    folder = checkpoints("qwen3_moe", tied=False, moe_intermediate_size=128, **sizes)
    engine = engine_of(folder, experts, backend="torch")
    format = FORMATS["fp8"]
    source = QuantisedWeights(engine, format)
    for _ in range(2):
        whole = dict(quantised(engine.named_weights(), format))
        parts = {shard.name: shard for shard in source.shards()}
        assert parts.keys() == whole.keys()
        assert parts["model.layers.1.mlp.experts.7.down_proj.weight"].view.dtype is torch.float8_e4m3fn
        for name, part in parts.items():
            assert (part.start, part.stop) == ((0,) * whole[name].dim(), tuple(whole[name].shape))
            assert torch.equal(part.view.view(torch.uint8), whole[name].view(torch.uint8)), name
        engine.train_lm(batch())


@pytest.mark.usefixtures("world_of_one")
def test_the_router_computes_in_float32_in_a_model_of_bfloat16(checkpoints: Callable[..., Path]) -> None:
    engine = engine_of(checkpoints(**MODELS["mixtral"]), "grouped", dtype="bfloat16", backend="torch")
    seen = []

    def check(router: TopKRouter, args: tuple[Tensor, ...], out: tuple[Tensor, Tensor]) -> None:
        assert router.weight.dtype == args[0].dtype == torch.bfloat16
        logits = args[0].float().flatten(0, 1) @ router.weight.float().T
        best, places = logits.topk(router.topk, dim=-1)
        expected = torch.zeros_like(logits).scatter(1, places, best.softmax(dim=-1))
        torch.testing.assert_close(out[0], expected, atol=1e-6, rtol=0)
        seen.append(out[0].dtype)

    routers = [m for m in engine.modules[0].modules() if isinstance(m, TopKRouter)]
    for router in routers:
        router.register_forward_hook(check)
    engine.eval().logprobs(batch())
    assert seen == [torch.float32] * len(routers)


@pytest.mark.parametrize(
    ("experts", "backend", "grouped"),
    [
        ("auto", "te", True),
        ("auto", "torch", False),
        ("auto", "cpu", False),
        ("grouped", "cpu", True),
        ("sequential", "te", False),
    ],
)
def test_experts_are_grouped_by_transformer_engine_or_where_told(experts: str, backend: str, grouped: bool) -> None:
    assert groups_experts(EngineConfig(experts=experts), backend) == grouped


FLEX = {"moe_dispatcher": "flex", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("family", "knobs", "layout", "message"),
    [
        ("qwen3", {"experts": "grouped"}, {}, "actor.experts=grouped is about experts, and this qwen3 model has none"),
        (
            "qwen3",
            FLEX,
            {"ep_size": 2},
            "actor.moe_dispatcher=flex is about experts, and this qwen3 ",
        ),
        ("mixtral", FLEX, {}, "ep_size=1 x etp_size=1 = 1 ranks: DeepEP takes 2, 4, .*; change the sizes, or use all"),
        ("mixtral", FLEX, {"dp_size": 12, "ep_size": 12}, "ep_size=12 x etp_size=1 = 12 ranks: DeepEP takes 2, 4, 8"),
        ("mixtral", FLEX | {"dtype": "float32"}, {"ep_size": 2}, "sends bfloat16 only, and actor.dtype=float32; set"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(
    family: str, knobs: dict[str, str], layout: dict[str, int], message: str, checkpoints: Callable[..., Path]
) -> None:
    config, parallel = EngineConfig(**knobs), ParallelConfig(**{"dp_size": 2, **layout})
    model = read_config(str(checkpoints(family, tied=False)))
    with pytest.raises(UserError, match=message) as error:
        run_all([*knob_checks(config, parallel), *model_checks(config, parallel, model)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("has_gpu", "missing"), [(True, "the package"), (False, "a GPU")])
def test_deep_ep_is_missed_before_anything_starts(has_gpu: bool, missing: str) -> None:
    config = EngineConfig(**FLEX)
    with pytest.raises(UserError, match=f"needs the package deep_ep and a GPU, and {missing} was not found; set it to"):
        check_device(config, has_gpu=has_gpu, has_te=True)
    check_device(config, has_gpu=True, has_te=True, has_deep_ep=True)
