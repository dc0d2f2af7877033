"""Estimates of memory, byte for byte, of real models in all ways of training. `memory_table.json` holds them.

`test_memory.py` holds the estimate to what training takes, within 15%. A change of less than that, in a mode that no
CPU can measure, is noticed here. Where a change is meant: `python -m tests.unit.actor.memory_table` writes the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.actor.config import EngineConfig, LoraConfig
from megarl.actor.sizes.memory import LayerBytes, StepLoad, host_memory, trainer_memory
from megarl.actor.sizes.server_memory import server_memory
from megarl.cli import ASSETS
from megarl.families import read_config
from megarl.families.weight_formats import FORMATS
from megarl.parallel.config import ParallelConfig

FILE = Path(__file__).with_suffix(".json")
MODELS: dict[str, tuple[dict[str, Any], ...]] = {  # of each kind of layer, with two layouts or more
    "Qwen/Qwen2.5-0.5B-Instruct": ({"tp_size": 2}, {"cp_size": 2, "dp_size": 2}, {"pp_size": 2, "vpp_size": 2}),
    "Qwen/Qwen3-8B": ({"tp_size": 4, "sequence_parallel": True}, {"tp_size": 2, "cp_size": 2, "pp_size": 2}),
    "google/gemma-3-1b-it": ({}, {"tp_size": 2, "sequence_parallel": True}),
    "lmsys/gpt-oss-20b-bf16": ({"ep_size": 4, "dp_size": 4}, {"tp_size": 2, "etp_size": 2}),
    "mistralai/Mixtral-8x7B-v0.1": ({"tp_size": 2, "etp_size": 1, "ep_size": 2}, {"dp_size": 8, "ep_size": 8}),
    "Qwen/Qwen3-30B-A3B": ({"tp_size": 2, "sequence_parallel": True, "ep_size": 2, "dp_size": 2}, {"dp_size": 2}),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ({"tp_size": 2, "ep_size": 2, "dp_size": 2}, {"pp_size": 4}),
    "moonshotai/Moonlight-16B-A3B": ({"dp_size": 4, "ep_size": 4}, {"tp_size": 2, "cp_size": 2}),
    "zai-org/GLM-4.5-Air": ({"tp_size": 4, "sequence_parallel": True}, {"pp_size": 2, "dp_size": 2, "ep_size": 2}),
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16, selective": {"dtype": "bfloat16", "recompute": "selective", "float32_head": True},
    "bfloat16, full": {"dtype": "bfloat16", "recompute": "full", "kept_logits_mb": 512, "offload_optimizer": True},
    "fp8": {"dtype": "bfloat16", "fp8": "blockwise", "offload_activations": 2},
    "adapters": {"dtype": "bfloat16", "lora": LoraConfig(rank=32, dropout=0.1)},
    "nf4": {"dtype": "bfloat16", "recompute": "selective", "lora": LoraConfig(rank=16, quantization="nf4")},
}
DEVICES = {"gpu": True, "cpu": False}
LAYERS = 4  # of each model, which keeps a table of hundreds of cases quick
LOAD = StepLoad(tokens=16384, microbatches=6)
SERVERS: dict[str, dict[str, Any]] = {"plain": {}, "fp8": {"format": FORMATS["fp8"], "cache_bytes": 1}}


def rows() -> Iterator[tuple[str, dict[str, float]]]:
    """Every case's name and estimates, bytes by part."""
    for (name, layouts), (on, on_gpu) in itertools.product(MODELS.items(), DEVICES.items()):
        model = read_config(str(ASSETS / "configs" / name))
        model.num_hidden_layers = LAYERS
        if getattr(model, "layer_types", None):
            model.layer_types = model.layer_types[:LAYERS]
        for sizes, (mode, knobs) in itertools.product(layouts, ENGINES.items()):
            if not on_gpu and knobs.get("fp8"):
                continue
            parallel, engine = ParallelConfig(**sizes), EngineConfig(max_tokens_per_mb=LOAD.tokens, **knobs)
            found: dict[str, float] = dataclasses.asdict(LayerBytes.of(model, parallel, engine, on_gpu))
            for stage in sorted({0, parallel.pp_size - 1}):
                memory = trainer_memory(model, parallel, engine, LOAD, stage, on_gpu)
                found |= {f"stage {stage} {part}": size for part, size in dataclasses.asdict(memory).items()}
                found[f"stage {stage} total"] = memory.total
                if on_gpu:
                    found[f"stage {stage} host"] = host_memory(model, parallel, engine, stage, LOAD)
            layout = ",".join(f"{key.removesuffix('_size')}{value}" for key, value in sizes.items()) or "one rank"
            yield f"{name} {layout} {on}: {mode}", found
        if on_gpu:
            for kind, given in SERVERS.items():
                for tp_size in (1, 4):
                    served = server_memory(model, tp_size, "bfloat16", 10**6, **given)
                    yield f"{name} server tp{tp_size}: {kind}", {**dataclasses.asdict(served), "total": served.total}


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in rows()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
