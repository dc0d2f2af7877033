"""Runs options of the layers on the stand-in of Transformer Engine, beside the same layers in bfloat16.

Arguments as in `stand_in_worker.py`, whose ranks these are. A case has `name`, `model`, `layout`, and the options
`recompute`, `fp8` and `tp_comm_overlap`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.module import base

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.gpu import userbuffers
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch
from tests.distributed.layout_worker import ADAM, loss_fn, loss_weight_fn
from tests.te import stand_in_worker


def engine_of(work: Path, case: dict[str, Any], has_options: bool, max_tokens: int = 60) -> MegatronEngine:
    config = EngineConfig(
        path=str(work / case["model"] / "model"),
        backend="te",
        dtype="bfloat16",
        fp8=case["fp8"] if has_options else "off",
        max_tokens_per_mb=max_tokens,
        recompute=case["recompute"],
        optimizer=OptimizerConfig(**ADAM),
    )
    overlap = case["tp_comm_overlap"] and has_options
    engine = MegatronEngine(config, ParallelConfig(**case["layout"], tp_comm_overlap=overlap))
    engine.initialize()
    return engine


def measure(work: Path, case: dict[str, Any]) -> None:
    stored = load_file(work / case["model"] / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    facts: dict[str, Any] = {}
    for kind in ("plain", "changed"):
        FP8GlobalStateManager.rounded.clear()
        engine = engine_of(work, case, kind == "changed")
        logprobs = engine.eval().logprobs(batch)
        stats = [engine.train().train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs") for _ in range(2)]
        facts[kind] = {
            "logprobs": logprobs.tolist(),
            "stats": stats,
            "rounded": sorted(FP8GlobalStateManager.rounded),
            "dtypes": sorted({str(tensor.dtype) for _, tensor in engine.named_weights()}),
            "entered": len(FP8GlobalStateManager.recipes),
            "buffers": list(base._ub_shapes),
        }
        rank = engine.groups.rank
        engine.modules, engine.ddps = [], []
    if case["tp_comm_overlap"]:
        engine_of(work, case, has_options=True)  # a second model of this shape takes the first one's buffers
        try:
            engine_of(work, case, has_options=True, max_tokens=900)
        except UserError as error:
            facts["refused"] = str(error)
    userbuffers.destroy()
    groups.leave_layout()
    (work / f"{case['name']}.rank{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    stand_in_worker.measure = measure
    sys.exit(stand_in_worker.main(Path(sys.argv[1]), json.loads(sys.argv[2])))
