"""Worker of every rank: trains adapters for each layout and model, and writes log-probs, adapters and merged weights.

Arguments: the work folder, layouts as JSON {"name": {parallel knobs}}, and their models as JSON {"name": [model]}.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch
from tests.distributed.layout_worker import ADAM, loss_fn, loss_weight_fn, run_layouts

RANK, ALPHA, STEPS = 4, 6.0, 3


def digest(tensor: Tensor) -> str:
    return sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def of_this_rank(engine: MegatronEngine) -> dict[str, dict[str, str]]:
    """Digests of the rank's boxes of adapters, and of what layer 0's drop of ones in the first step."""
    lora = engine._weights.lora
    assert lora is not None
    masks = {}
    for kind in ("linear_qkv", "linear_proj"):
        adapter = engine.modules[0].get_submodule(f"decoder.layers.0.self_attention.{kind}.lora")
        with lora.masks_of_step(0):
            masks[kind] = digest(adapter._dropped(torch.ones(50, 64)))
    return {"boxes": {f"{box.name} {box.start}": digest(box.view) for box in lora.shards()}, "masks": masks}


def measure(folder: Path, parallel: ParallelConfig, out: Path) -> None:
    """Computes and writes what the test compares, for one checkpoint and one layout."""
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    knobs = json.loads((folder / "knobs.json").read_text())
    lora = knobs.pop("lora", {})
    config = EngineConfig(
        path=str(folder / "model"),
        max_tokens_per_mb=60,
        **knobs,
        optimizer=OptimizerConfig(**ADAM, clip_grad=1.0),
        lora=LoraConfig(
            rank=RANK,
            alpha=ALPHA,
            path=str(folder / "adapter"),
            **lora,
        ),
    )
    engine = MegatronEngine(config, parallel)
    engine.initialize()
    result = {"logprobs": engine.eval().logprobs(batch)}
    engine.save(out / "loaded")
    engine.train()
    stats = []
    for step in range(STEPS):
        stats.append(engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs"))
        if step == 0:
            engine.save_state(out / "state")
    result["trained"] = engine.eval().logprobs(batch)
    result.update({f"merged.{name}": tensor.clone() for name, tensor in engine.named_weights()})
    with engine.base_alone():
        result["base"] = engine.logprobs(batch)
    engine.save(out / "trained")
    if "dropout" in lora:
        (out / f"rank_{engine.groups.rank}.json").write_text(json.dumps(of_this_rank(engine)))
    for name, source in (("resumed", out), ("from_tp1", out.parent / "tp1")):
        engine.load_state(source / "state")
        engine.train()
        for _ in range(STEPS - 1):
            engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")
        result[name] = engine.eval().logprobs(batch)
    if engine.groups.rank == 0:
        save_file(result, out / "out.safetensors")
        (out / "stats.json").write_text(json.dumps(stats))


if __name__ == "__main__":
    run_layouts(measure, Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
