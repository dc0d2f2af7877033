"""Reads signatures from Transformer Engine itself, and the parameters of models that it builds. Needs no GPU.

    build/gpu-env/bin/python -m tests.te.record tests/te/transformer_engine.json
    PYTHONPATH=build/te-modules:. python -m tests.te.record tests/te/transformer_engine.json --without-extension
    PYTHONPATH=tests/te/stand_in:. python -m tests.te.record FILE --stand-in

The first runs in the environment of `make gpu-env`. Mocked are the properties of a GPU, which Transformer Engine asks
for, and the current device, which is the CPU: on the meta device it would leave the marks of parameters out. Process
groups are of torch's backend `fake`, and megarl's compiled kernels, which run nothing here, are a mock.

The second has the package's Python modules alone (`python_modules.py`). It adds models to a record of the first: what
that one holds must come out again, signature by signature and mark by mark. The record names the models that it added
under `without_extension`, with the torch that they were built with. The third builds the models from the stand-in.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from tests.te import python_modules
from tests.te.cases import MODELS, NAMES, OFFERED, SHAPE, runs

PACKAGES = ("transformer_engine", "torch", "megatron-core")
MARKS = {"tensor_model_parallel": False, "partition_dim": -1, "allreduce": True, "sequence_parallel": False}


def pretend_gpu() -> None:
    """Answers as an H100 would; torch itself finds no device."""
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        major=9, minor=0, name="NVIDIA H100", multi_processor_count=132, total_memory=80 * 2**30
    )
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.backends.cudnn.version = lambda: python_modules.CUDNN
    new_group = dist.new_group  # Megatron asks for groups of gloo too
    dist.new_group = lambda *args, **options: new_group(*args, **{**options, "backend": "fake"})
    sys.modules["megarl._C"] = MagicMock(has_cuda=True)
    sys.modules["flash_mla"] = None  # type: ignore[assignment] (it loads the driver's library)


def found(name: str) -> Any:
    """An attribute below `transformer_engine.pytorch`, whose path may begin with modules."""
    value: Any = importlib.import_module("transformer_engine.pytorch")
    path = value.__name__
    for part in name.split("."):
        path = f"{path}.{part}"
        if not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


def signature(name: str) -> list[dict[str, Any]]:
    """Parameters of a function. Defaults that JSON cannot hold become text, which no argument equals."""
    parameters = []
    for p in inspect.signature(found(name)).parameters.values():
        if p.name == "self":
            continue
        entry: dict[str, Any] = {"name": p.name, "kind": p.kind.name}
        if p.default is not p.empty:
            entry["default"] = p.default if isinstance(p.default, None | bool | int | float | str) else repr(p.default)
        parameters.append(entry)
    return parameters


def parameters_of(name: str, layout: dict[str, Any], rank: int, recompute: str) -> list[dict[str, Any]]:
    """Names, shapes and marks of the parameters on a rank, for each virtual stage."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig

    from megarl.actor.config import EngineConfig
    from megarl.actor.model.backends import choose_backend
    from megarl.actor.model.build import build_model
    from megarl.actor.weights import hf_weights
    from megarl.parallel import groups
    from megarl.parallel.config import ParallelConfig
    from megarl.parallel.determinism import OFF

    parallel = ParallelConfig(**layout)
    fields = {**SHAPE, **MODELS[name]}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size())
    knobs = EngineConfig(path=name, backend="te", dtype="bfloat16", recompute=recompute)
    backend = choose_backend(knobs, config, OFF)
    stages = build_model(config, groups.initialize(parallel), torch.bfloat16, backend, recompute)
    result = [
        {
            key: {
                "shape": list(p.shape),
                **({} if p.dtype == torch.bfloat16 else {"dtype": str(p.dtype).removeprefix("torch.")}),
                **{m: getattr(p, m) for m, plain in MARKS.items() if getattr(p, m, plain) != plain},
            }
            for key, p in hf_weights.named_tensors(stage).items()
        }
        for stage in stages
    ]
    groups.destroy()
    return result


def record(*, stand_in: bool = False) -> dict[str, Any]:
    from megarl.actor.model.attention import delta_net
    from megarl.parallel import platform

    for name in (*NAMES, *OFFERED):
        found(name)
    if stand_in:
        delta_net.check_kernels = lambda: None  # of another package, which has no parameters
    platform.has_gpu = lambda: False
    platform.takes_gpu_options = lambda: True
    return {
        "versions": {} if stand_in else {name: importlib.metadata.version(name) for name in PACKAGES},
        "without_extension": {},
        "signatures": {} if stand_in else {name: signature(name) for name in NAMES},
        "models": [
            {
                "model": name,
                "layout": layout,
                "rank": rank,
                "recompute": recompute,
                "stages": parameters_of(name, layout, rank, recompute),
            }
            for name, layout, rank, recompute in runs()
        ],
    }


def with_compiled(facts: dict[str, Any], compiled: dict[str, Any]) -> dict[str, Any]:
    """Facts without the extension as additions to a record with it, which they must repeat.

    Raises:
        ValueError: they differ from the record, in more than torch's version.
    """
    added = compiled["without_extension"].get("models", [])
    own = [entry for entry in compiled["models"] if entry["model"] not in added]
    changed = [entry for entry in own if entry not in facts["models"]]
    versions = {**facts["versions"], "torch": compiled["versions"]["torch"]}
    if changed or facts["signatures"] != compiled["signatures"] or versions != compiled["versions"]:
        raise ValueError(f"the record with the extension says otherwise: {changed[:1] or versions}")
    names = [name for name in MODELS if name not in {entry["model"] for entry in own}]
    return {**facts, "versions": versions, "without_extension": {"torch": facts["versions"]["torch"], "models": names}}


def write(facts: dict[str, Any], file: Path) -> None:
    """One line for each signature and for each model, so that a difference can be read."""
    lines = [f'{{"versions": {json.dumps(facts["versions"])},']
    lines += [f'"without_extension": {json.dumps(facts["without_extension"])},', '"signatures": {']
    lines += [f"{json.dumps(n)}: {json.dumps(s)}," for n, s in facts["signatures"].items()]
    lines[-1] = lines[-1].removesuffix(",")
    lines += ["},", '"models": [', *(f"{json.dumps(m)}," for m in facts["models"])]
    lines[-1] = lines[-1].removesuffix(",")
    file.write_text("\n".join([*lines, "]}", ""]))


def main(file: Path, parts: str = "") -> None:
    pretend_gpu()
    if parts == "--without-extension":
        python_modules.import_modules()
    facts = record(stand_in=parts == "--stand-in")
    if parts == "--without-extension":
        facts = with_compiled(facts, json.loads(file.read_text()))
    write(facts, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
