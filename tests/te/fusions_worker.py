"""Runs the backend `te` with each of its fusions off and on, beside `torch`, on the stand-in of Transformer Engine.

Arguments as in `stand_in_worker.py`, whose ranks these are. A case has `name`, `model`, `layout`, `off` (fusions that
are turned off, one at a time), and `knobs` of the engine of `te`. With `reference` te, one with all fusions is there in
place of `torch`. With `replays`, routers take the batch's experts; with `nan`, a step has a token that is NaN.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformer_engine.kernels import Launches
from transformer_engine.pytorch.router import fused_topk_with_score_function

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model import fused_layers
from megarl.actor.model.backends import LayerBackend
from megarl.actor.policy import MegatronPPOActor
from megarl.algorithms import GRPOConfig, algorithm_of
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import ROUTED_EXPERTS, PackedBatch
from tests.distributed.layout_worker import ADAM, gather_gradients, loss_fn, loss_weight_fn
from tests.te import stand_in_worker
from tests.te.stand_in_worker import worst

KNOBS = {"grouped experts": {"experts": "sequential"}}  # fusions that a knob turns off
FIELDS: dict[str, dict[str, Any]] = {  # fields of the backend that turn one off
    "norm and projection": {"norm_linear": None},
    "permutation": {"fused_permutation": False},
    "routing": {"fused_routing": False},
    "shared experts": {"overlaps_shared_experts": False},
}
CONFIG_FIELDS = {"SwiGLU": "bias_activation_fusion", "rotary positions": "apply_rope_fusion"}


def turned_off(backend: LayerBackend, fusion: str) -> LayerBackend:
    fields = {name: on for name, on in backend.config_fields.items() if name != CONFIG_FIELDS.get(fusion)}
    # kernels of gated delta nets run on GPUs alone (test_fla_kernels.py)
    return dataclasses.replace(backend, config_fields=fields, fused_delta_rule=False, **FIELDS.get(fusion, {}))


def engine_of(backend: str, off: str, model: Path, case: dict[str, Any]) -> MegatronEngine:
    knobs = {**(case["knobs"] if backend == "te" else {}), **KNOBS.get(off, {})}
    config = EngineConfig(
        path=str(model),
        backend=backend,
        optimizer=OptimizerConfig(**ADAM),
        **{"max_tokens_per_mb": 60, **knobs},
    )
    parallel = ParallelConfig(**case["layout"])
    with pytest.MonkeyPatch.context() as patch:
        if off == "accumulation":
            patch.setattr(fused_layers, "accumulating", lambda module: module)
        if case["replays"]:
            algorithm = algorithm_of(GRPOConfig(routing_replay="rollout"))
            engine: MegatronEngine = MegatronPPOActor(config, algorithm, parallel)
        else:
            engine = MegatronEngine(config, parallel)
        engine.backend = turned_off(engine.backend, off)
        engine.initialize()
    return engine


def signs(engine: MegatronEngine, kernels: dict[str, int]) -> dict[str, bool]:
    """By fusion: if the engine's layers have it, as the layers and the kernels that ran show."""
    modules = [m for module in engine.modules for m in module.modules()]
    names, config = {type(m).__name__ for m in modules}, engine.stages[0].config
    return {
        "norm and projection": "TELayerNormColumnParallelLinear" in names,
        "SwiGLU": config.bias_activation_fusion,
        "rotary positions": config.apply_rope_fusion,
        "accumulation": any(getattr(m, "fuse_wgrad_accumulation", False) for m in modules),
        "grouped experts": "TEGroupedMLP" in names,
        "permutation": kernels.get("permute", 0) > 0,
        "routing": kernels.get("fused_topk", 0) > 0 and kernels.get("fused_topk_backward", 0) > 0,
        "shared experts": any(getattr(m, "shared_expert_overlap", False) for m in modules),
    }


def true_fields(backend: LayerBackend) -> list[str]:
    """Names of what the backend turns on: its fields that are True, and those of Megatron's config."""
    own = {field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)}
    return sorted(name for name, value in {**own, **backend.config_fields}.items() if value is True)


def results_of(engine: MegatronEngine, batch: PackedBatch) -> tuple[dict[str, Tensor], dict[str, int]]:
    with Launches() as launches:
        result = {"logprobs": engine.eval().logprobs(batch)}
        engine.train()
        norm = engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")["grad_norm"]
    result |= {f"gradient.{name}": t for name, t in gather_gradients(engine).items()}
    return result | {"gradient.norm": torch.tensor(norm)}, launches.counts


def with_nan(engine: MegatronEngine, batch: PackedBatch) -> float:
    """Steps left out where a token's embedding is NaN."""
    embedding = next(p for name, p in engine.stages[0].named_parameters() if name.endswith("word_embeddings.weight"))
    with torch.no_grad():
        embedding[batch["input_ids"][7]] = torch.nan
    return engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")["skipped_steps"]


def experts_of_nan() -> int:
    """Experts that the kernel itself gives to a token whose logits are NaN, of three that the token should get."""
    logits = torch.full((1, 40), torch.nan)
    _, routing_map = fused_topk_with_score_function(logits, 3, False, None, None, None, "softmax", None)
    return int(routing_map.sum())


def measure(work: Path, case: dict[str, Any]) -> None:
    stored = load_file(work / case["model"] / "batch.safetensors")
    if not case["replays"]:
        del stored[ROUTED_EXPERTS]
    batch, model = PackedBatch(stored.pop("cu_seqlens"), stored), work / case["model"] / "model"
    expected, _ = results_of(engine_of(case["reference"], "", model, case), batch)
    facts: dict[str, Any] = {"runs": {}}
    for off in ["", *case["off"]]:
        engine = engine_of("te", off, model, case)
        facts.setdefault("fields", true_fields(engine.backend))
        result, kernels = results_of(engine, batch)
        facts["runs"][off] = {"errors": worst(result, expected), "signs": signs(engine, kernels)}
        if case["nan"] and not off:
            facts |= {"skipped": with_nan(engine, batch), "experts_of_nan": experts_of_nan()}
    if engine.groups.rank == 0:
        (work / f"{case['name']}.json").write_text(json.dumps(facts))
    groups.leave_layout()


if __name__ == "__main__":
    stand_in_worker.measure = measure
    sys.exit(stand_in_worker.main(Path(sys.argv[1]), json.loads(sys.argv[2])))
