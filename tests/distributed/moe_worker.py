"""Worker of every rank: for each layout and checkpoint, computes log-probs, trains, and writes the results.

Arguments: the work folder, then layouts as JSON: {"name": {parallel knobs}, ...}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch
from tests.distributed.layout_worker import ADAM, loss_fn, loss_weight_fn

ALONE = 5  # index of a sequence that forms a batch by itself, so other data parallel ranks have no sequence


def measure(folder: Path, parallel: ParallelConfig, out: Path) -> None:
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    config = EngineConfig(path=str(folder / "model"), max_tokens_per_mb=60, optimizer=OptimizerConfig(**ADAM))
    engine = MegatronEngine(config, parallel)
    engine.initialize()
    result = {"logprobs": engine.eval().logprobs(batch), "again": engine.logprobs(batch)}
    result["one_by_one"] = torch.cat([engine.logprobs(batch.select([i])) for i in range(batch.num_seqs)])
    result.update({f"before.{name}": t.clone() for name, t in engine.named_weights()})
    engine.train()
    stats = [
        engine.train_batch(part, loss_fn, loss_weight_fn, loss_input="logprobs")
        for part in (batch, batch, batch.select([ALONE]))
    ]
    result.update({f"after.{name}": t.clone() for name, t in engine.named_weights()})
    engine.save(out / "exported")
    if engine.groups.rank == 0:
        save_file(result, out / "out.safetensors")
        (out / "stats.json").write_text(json.dumps(stats))


def main(work: Path, layouts: dict[str, dict[str, int]]) -> None:
    torch.set_num_threads(1)
    for name, knobs in layouts.items():
        for folder in sorted(p for p in work.iterdir() if p.is_dir()):
            out = folder / name
            out.mkdir(exist_ok=True)
            measure(folder, ParallelConfig(**knobs), out)
        groups.leave_layout()
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
