"""Worker of every rank: trains each model with and without its layers of multi-token prediction, under each layout.

Arguments: the work folder, layouts as JSON {"name": {parallel knobs}}, and their models as JSON {"name": [model]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from safetensors.torch import load_file

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.supervised import MegatronLMEngine, trained_tokens
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch

CLIP = 0.5  # below both gradient norms
FACTOR = 0.7
STEPS = 2
ADAM = {"lr": 0.3, "adam_eps": 1.0, "clip_grad": CLIP}  # see layout_worker.py


def train(folder: Path, parallel: ParallelConfig, out: Path, mtp: str, recompute: str) -> list[dict[str, float]]:
    """Takes `STEPS` steps, writes the weights after each, and with mtp=train repeats the last one from a state."""
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)

    def engine_of() -> MegatronLMEngine:
        config = EngineConfig(
            path=str(folder / "model"),
            max_tokens_per_mb=60,
            optimizer=OptimizerConfig(**ADAM),
            mtp=mtp,
            mtp_loss_scaling_factor=FACTOR,
            recompute=recompute,
        )
        engine = MegatronLMEngine(config, parallel)
        engine.initialize()
        return engine

    engine, stats = engine_of(), []
    for step in range(STEPS):
        if step == STEPS - 1:
            engine.snapshot_state().write(out / f"state_{mtp}")
            torch.distributed.barrier()
        stats.append(engine.train_lm(batch))
        engine.save(out / f"{mtp}_{step + 1}")
    stats.append(engine.evaluate_lm(batch))
    if mtp == "train":
        check_megatrons_roll(engine, batch)
        resumed = engine_of()
        resumed.load_state(out / f"state_{mtp}")
        stats.append(resumed.train_lm(batch))
        resumed.save(out / "resumed")
    return stats


def check_megatrons_roll(engine: MegatronLMEngine, batch: PackedBatch) -> None:
    """Compares this rank's tokens of the future with those of Megatron's roll, by padded bounds."""
    for mb in engine._microbatches(batch, trained_tokens):
        bounds = engine._cut.padded_cu_seqlens(mb.batch.cu_seqlens.cpu())
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        rolled = mb.input_ids[None]
        for future in mb.future:
            rolled, _ = roll_tensor(rolled, cp_group=engine.groups.cp, packed_seq_params=packed)
            assert torch.equal(rolled[0], future.ids)


def main(work: Path, layouts: dict[str, dict[str, Any]], models: dict[str, list[str]]) -> None:
    """Creates each layout in the same processes, and runs its models."""
    torch.set_num_threads(1)
    for name, knobs in layouts.items():
        recompute = knobs.pop("recompute", "none")
        for model in models[name]:
            out = work / model / name
            out.mkdir(exist_ok=True)
            parallel = ParallelConfig(**knobs)
            stats = {mtp: train(work / model, parallel, out, mtp, recompute) for mtp in ("carry", "train")}
            if torch.distributed.get_rank() == 0:
                (out / "stats.json").write_text(json.dumps(stats))
        groups.leave_layout()
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
