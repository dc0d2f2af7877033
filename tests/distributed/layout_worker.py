"""Runs on every rank of a layout: loads each checkpoint, measures it, trains two steps, and writes what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch

STEPS = 2
# A large eps makes Adam's update a smooth function of the gradient: with the usual one, elements whose gradient is all
# but zero move by a whole lr in a direction that rounding decides, and nothing could be compared.
ADAM = {"lr": 0.3, "adam_eps": 1.0}
ENTROPY_BONUS = 0.1


def loss_fn(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy-gradient loss with an entropy bonus, so that both gradients are seen."""
    mask = data["loss_mask"].bool()
    loss = -((logprobs * data["advantages"] + ENTROPY_BONUS * entropy) * mask).sum() / mask.sum()
    return loss, {"nll_max": (-logprobs.detach() * mask).max()}


def loss_weight_fn(data: PackedBatch) -> Tensor:
    return data["loss_mask"].sum()


def main(work: Path, tp_size: int, pp_size: int, dp_size: int) -> None:
    torch.set_num_threads(1)
    for folder in sorted(p for p in work.iterdir() if p.is_dir()):
        stored = load_file(folder / "batch.safetensors")
        batch = PackedBatch(stored.pop("cu_seqlens"), stored)
        optimizer = OptimizerConfig(**ADAM, clip_grad=1.0)
        config = EngineConfig(path=str(folder / "model"), max_tokens_per_mb=60, optimizer=optimizer)
        engine = MegatronEngine(config, ParallelConfig(tp_size=tp_size, pp_size=pp_size, dp_size=dp_size))
        engine.initialize()
        out = {"logprobs": engine.eval().logprobs(batch)}
        out["one_by_one"] = torch.cat([engine.logprobs(batch.select([i])) for i in range(batch.num_seqs)])
        before = {f"before.{name}": t.clone() for name, t in engine.named_weights()}
        engine.train()
        stats = [engine.train_batch(batch, loss_fn, loss_weight_fn, sees="logprobs") for _ in range(STEPS)]
        after = {f"after.{name}": t.clone() for name, t in engine.named_weights()}
        engine.save(folder / "exported")
        if engine.groups.rank == 0:
            save_file({**out, **before, **after}, folder / "out.safetensors")
            (folder / "stats.json").write_text(json.dumps(stats))
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
