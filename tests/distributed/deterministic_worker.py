"""Worker of every rank: for each layout and model of a deterministic run, log-probs, gradients and two trained steps.

Arguments: the work folder, layouts as JSON {"name": {parallel knobs}}, and their models as JSON {"name": [model]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import same_bits
from megarl.types import PackedBatch
from tests.distributed.layout_worker import ADAM, gather_gradients, loss_fn, loss_weight_fn, run_layouts

SUMMANDS = 2


def measure(folder: Path, parallel: ParallelConfig, out: Path) -> None:
    """Computes and writes the results that the test compares, for one checkpoint and one layout."""
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    optimizer = OptimizerConfig(**ADAM, clip_grad=1.0)
    config = EngineConfig(path=str(folder / "model"), max_tokens_per_mb=60, optimizer=optimizer)
    engine = MegatronEngine(config, parallel, deterministic=same_bits(SUMMANDS))
    engine.initialize()
    result = {"logprobs": engine.eval().logprobs(batch)}
    engine.train()
    stats = [engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")]
    result.update({f"gradient.{name}": t for name, t in gather_gradients(engine).items()})
    stats.append(engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs"))
    if engine.groups.rank == 0:
        save_file(result, out / "out.safetensors")
        (out / "stats.json").write_text(json.dumps(stats))


if __name__ == "__main__":
    run_layouts(measure, Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
