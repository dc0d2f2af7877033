"""Worker of every rank: replays made routes on each layout and model, trains a step on them, and writes the results.

Arguments: the work folder, layouts as JSON {"name": {parallel knobs}}, and their models as JSON {"name": [model]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from megarl.actor.config import OptimizerConfig
from megarl.parallel.config import ParallelConfig
from megarl.types import ROUTED_EXPERTS, PackedBatch
from tests.distributed.layout_worker import gather_gradients, loss_fn, loss_weight_fn, run_layouts
from tests.sglang.replay_worker import actor_of, chosen, copy_of

# A large eps, as in layout_worker.py. Rounding of delta nets takes more of a log-prob after a larger step.
ADAM = {"lr": 0.01, "adam_eps": 1.0}


def measure(folder: Path, parallel: ParallelConfig, out: Path) -> None:
    """Writes what routers choose with given routes and without, and log-probs before and after a step on them."""
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    optimizer = OptimizerConfig(**ADAM, clip_grad=1.0)
    actor = actor_of(folder / "model", "rollout", parallel, recompute="full", optimizer=optimizer, max_tokens_per_mb=60)
    result = {
        "own": chosen(actor, copy_of(batch, without=ROUTED_EXPERTS)),
        "replayed": chosen(actor, batch),
        "before": actor.eval().logprobs(batch),
    }
    assert actor._replay is not None
    actor._replay.changed_share()  # begins anew
    actor.train()
    stats = actor.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")
    stats["routes_changed"] = actor._replay.changed_share()
    assert all(not router.waiting for router in actor._replay.routers.values())
    result.update({f"gradient.{name}": tensor for name, tensor in gather_gradients(actor).items()})
    result["after"] = actor.eval().logprobs(batch)
    if actor.groups.rank == 0:
        save_file(result, out / "out.safetensors")
        (out / "stats.json").write_text(json.dumps(stats))


if __name__ == "__main__":
    run_layouts(measure, Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
