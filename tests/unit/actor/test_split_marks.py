"""The engine's check of Megatron's tensor-parallel marks, on parameters as the shard table cuts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.actor.weights import split_marks
from megarl.actor.weights.shard_spec import ShardSpec
from megarl.actor.weights.shards import shard_specs
from megarl.actor.weights.split_marks import check_split_marks
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import place_of
from megarl.preflight.invariance import MODELS

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2, "dp_size": 1},
    "tp4, 2 KV heads": {"tp_size": 4, "dp_size": 1},
    "pp2": {"pp_size": 2, "dp_size": 1},
    "tp2 ep2 etp1": {"tp_size": 2, "dp_size": 1, "ep_size": 2, "etp_size": 1},
    "ep2 etp2": {"dp_size": 4, "ep_size": 2, "etp_size": 2},
}
REPLICATED = ("norm", "router")


def world(model: str, layout: dict[str, Any], rank: int) -> tuple[list[Any], Any]:
    """A rank's modules with Megatron's marks, and its groups."""
    parallel = ParallelConfig(**layout)
    stages: dict[int, dict[str, Any]] = {}
    for spec in shard_specs(MODELS[model], parallel, place_of(parallel, rank)):
        parameter = torch.nn.Parameter(torch.empty(0, device="meta"))
        is_expert = ".experts." in spec.param
        parameter.tensor_model_parallel = not any(part in spec.param for part in REPLICATED)  # type: ignore[attr-defined]
        parameter.allreduce = not (is_expert and (parallel.ep_size > 1))  # type: ignore[attr-defined]
        stages.setdefault(spec.stage, {})[spec.param] = parameter
    modules: list[Any] = [SimpleNamespace(named_parameters=stages[stage].items) for stage in sorted(stages)]
    sizes = {"tp_size": parallel.tp_size, "etp_size": parallel.expert_tp_size}
    return modules, SimpleNamespace(layout=parallel, rank=rank, **sizes)


@pytest.mark.parametrize(
    ("model", "layout"), [(m, name) for m in ("dense", "moe") for name in LAYOUTS if m == "moe" or "ep2" not in name]
)
def test_megatrons_marks_pass_and_each_wrong_one_is_told(model: str, layout: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    for rank in range(parallel.world_size()):
        modules, groups = world(model, LAYOUTS[layout], rank)
        check_split_marks(modules, MODELS[model], groups)
        for module in modules:
            for name, parameter in module.named_parameters():
                size = parallel.expert_tp_size if ".experts." in name else parallel.tp_size
                if size == 1:
                    continue
                parameter.tensor_model_parallel = not parameter.tensor_model_parallel
                with pytest.raises(RuntimeError, match=name.replace(".", r"\.") + " is (split|replicated) over"):
                    check_split_marks(modules, MODELS[model], groups)
                parameter.tensor_model_parallel = not parameter.tensor_model_parallel


def test_experts_need_no_mark_with_etp_1() -> None:
    modules, groups = world("moe", LAYOUTS["tp2 ep2 etp1"], 0)
    for _, parameter in modules[0].named_parameters():
        if not parameter.allreduce:
            parameter.tensor_model_parallel = False
    check_split_marks(modules, MODELS["moe"], groups)


def test_a_part_of_experts_that_etp_ranks_share_may_not_bear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the bias of a row-parallel layer."""
    name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.bias"
    spec = ShardSpec("x", (4,), (0,), (4,), 0, name, (0,))
    monkeypatch.setattr(split_marks, "shard_specs", lambda *_: [spec])
    parameter = torch.nn.Parameter(torch.empty(0, device="meta"))
    parameter.allreduce = False  # type: ignore[attr-defined]
    modules: list[Any] = [SimpleNamespace(named_parameters={name: parameter}.items)]
    _, groups = world("moe", LAYOUTS["ep2 etp2"], 0)
    check_split_marks(modules, MODELS["moe"], groups)
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="is replicated over 2 tensor parallel ranks"):
        check_split_marks(modules, MODELS["moe"], groups)
