"""Parameters that Transformer Engine itself built (`record.py` wrote them down), against shard table and stand-in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megarl.actor.weights import hf_weights
from megarl.actor.weights.block_shards import is_buffer
from megarl.actor.weights.shard_spec import ShardSpec
from megarl.actor.weights.shards import shard_specs
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import Place, place_of, places
from tests.te import python_modules
from tests.te.cases import MODELS, SHAPE, runs

ROOT = Path(__file__).parents[2]
RECORD = json.loads((Path(__file__).parent / "transformer_engine.json").read_text())
IDS = [
    f"{m['model']}-{'-'.join(f'{k}={v}' for k, v in m['layout'].items())}-rank{m['rank']}-{m['recompute']}"
    for m in RECORD["models"]
]


def config_of(name: str) -> Any:
    fields = {**SHAPE, **MODELS[name]}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def test_the_record_is_of_the_versions_that_are_installed_on_gpus() -> None:
    pins = "\n".join((ROOT / "requirements" / name).read_text() for name in ("gpu.txt", "gpu_built.txt"))
    for package, version in RECORD["versions"].items():
        pin = re.search(rf"^{package.replace('_', '-')}(\[.*\])?==(\S+)", pins, re.MULTILINE)
        assert pin is not None, package
        assert version.partition("+")[0] == pin[2], f"{package}: run `make gpu-env`, then tests/te/record.py"


def test_models_built_without_the_extension_are_of_the_same_version_on_this_torch() -> None:
    """New version: see `python_modules.py` for the names, and `record.py --without-extension` for the models."""
    assert python_modules.NAMES["version"] == RECORD["versions"]["transformer_engine"]
    if added := RECORD["without_extension"]:
        assert f'"torch=={added["torch"].partition("+")[0]}"' in (ROOT / "pyproject.toml").read_text()
        assert set(added["models"]) < set(MODELS)


def test_a_call_of_the_extensions_names_says_which() -> None:
    with pytest.raises(RuntimeError, match=r"transformer_engine_torch\.rmsnorm_fwd was called"):
        python_modules.extension().rmsnorm_fwd()


@pytest.fixture(scope="module")
def built_by_stand_in(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("stand_in") / "record.json"
    path = os.pathsep.join([str(Path(__file__).parent / "stand_in"), str(ROOT)])
    command = [sys.executable, "-W", "ignore", "-m", "tests.te.record", str(file), "--stand-in"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    models: list[dict[str, Any]] = json.loads(file.read_text())["models"]
    return models


@pytest.mark.parametrize("number", range(len(IDS)), ids=IDS)
def test_the_stand_in_builds_the_recorded_parameters(number: int, built_by_stand_in: list[dict[str, Any]]) -> None:
    """Names, their order, shapes, dtypes and marks."""
    for built, recorded in zip(built_by_stand_in[number]["stages"], RECORD["models"][number]["stages"], strict=True):
        assert list(built) == list(recorded)
        assert built == recorded


def test_the_record_has_every_model_layout_and_rank() -> None:
    assert [(m["model"], m["layout"], m["rank"], m["recompute"]) for m in RECORD["models"]] == runs()


@pytest.mark.parametrize("entry", RECORD["models"], ids=IDS)
def test_names_and_shapes_are_the_shard_tables(entry: dict[str, Any]) -> None:
    """`shards` binds the table's boxes to the recorded parameters, as to a model's."""
    parallel = ParallelConfig(**entry["layout"])
    parameters = [{k: torch.empty(p["shape"], device="meta") for k, p in s.items()} for s in entry["stages"]]
    rest = {"named_buffers": dict, "named_modules": list}
    modules: Any = [SimpleNamespace(named_parameters=params.items, **rest) for params in parameters]
    groups: Any = SimpleNamespace(layout=parallel, rank=entry["rank"])
    held: dict[int, int] = {}  # elements in boxes, by parameter
    for shard in hf_weights.shards(modules, config_of(entry["model"]), groups):
        held[id(shard.view._base)] = held.get(id(shard.view._base), 0) + shard.view.numel()
    for params in parameters:
        for name, parameter in params.items():
            padding = parameter.numel() - held[id(parameter)]
            padded = name.startswith(("embedding.", "output_layer."))
            assert padding == 0 or (padded and 0 < padding < parameter.numel()), (name, padding)


@pytest.mark.parametrize("entry", RECORD["models"], ids=IDS)
def test_marks_say_how_the_shard_table_cuts_a_parameter(entry: dict[str, Any]) -> None:
    """By these marks Megatron counts a parameter once in the gradient's norm, and sums replicas' gradients over tp."""
    parallel, config = ParallelConfig(**entry["layout"]), config_of(entry["model"])
    place = place_of(parallel, entry["rank"])
    tables = {p: boxes(config, parallel, p) for p in places(parallel)}
    for (stage, param), own in tables[place].items():
        name, marks = hf_weights.native(entry["stages"][stage], own[0])
        assert (marks.get("dtype") == "float32") == (own[0].float32 or is_buffer(own[0].name)), name
        if is_buffer(own[0].name):
            continue
        expert = ".experts." in param
        spread = expert and (parallel.ep_size > 1 or parallel.expert_tp_size != parallel.tp_size)
        assert marks.get("allreduce", True) != spread, name
        others = [
            tables[p][stage, param]
            for p in tables
            if p.pp == place.pp and (p.ep == place.ep if expert else (p.cp, p.dp) == (place.cp, place.dp))
        ]
        if any(corners(other) != corners(own) for other in others):
            dim = 1 if any(len(s.shape) == 2 and s.stop[1] - s.start[1] < s.shape[1] for s in own) else 0
            assert marks.get("tensor_model_parallel"), name
            assert marks["partition_dim"] == dim, name
            assert "sequence_parallel" not in marks, name
        elif expert:  # each rank's experts are its own, with etp 1 too; the output's bias is in no product
            assert marks.get("tensor_model_parallel", False) == (".linear_fc2.bias" not in name), name
            assert "sequence_parallel" not in marks, name
        elif parallel.tp_size > 1:
            summed = name.endswith(".out_norm.weight")  # over tp, in the layer's own backward
            assert not marks.get("tensor_model_parallel"), name
            assert marks.get("sequence_parallel", False) == (parallel.sequence_parallel and not summed), name


def boxes(config: Any, parallel: ParallelConfig, place: Place) -> dict[tuple[int, str], list[ShardSpec]]:
    """The table of one rank, by virtual stage and parameter."""
    result: dict[tuple[int, str], list[ShardSpec]] = {}
    for spec in shard_specs(config, parallel, place):
        result.setdefault((spec.stage, spec.param), []).append(spec)
    return result


def corners(specs: list[ShardSpec]) -> list[Any]:
    return [(s.name, s.start, s.stop) for s in specs]
