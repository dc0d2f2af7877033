"""Worker of every rank: a critic's values, two updates and its export, and an actor with shared prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.critic import MegatronPPOCritic
from megarl.actor.supervised import MegatronLMEngine
from megarl.algorithms import PPO, PPOConfig
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch

# A large eps makes Adam's update a smooth function of the gradient (see layout_worker.py).
ADAM = OptimizerConfig(lr=0.3, adam_eps=1.0)


def measure(work: Path, parallel: ParallelConfig, out: Path) -> None:
    """Runs the layout on the model and batch in `work`, and writes the results to `out`."""
    stored = load_file(work / "batch.safetensors")
    groups = stored.pop("group_ids")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored, {"group_ids": groups})
    fields: dict[str, Any] = {"path": str(work / "model"), "max_tokens_per_mb": 60, "optimizer": ADAM}
    critic = MegatronPPOCritic(EngineConfig(**fields, value_head_std=0.3), PPO(PPOConfig(value_clip=0.2)), parallel)
    critic.initialize()
    tensors: dict[str, Tensor] = {"values": critic.compute_values(batch), "scores": critic.scores(batch)}
    stats = [critic.ppo_update(batch) for _ in range(2)]
    tensors["after"] = critic.compute_values(batch)
    critic.save(out / "hf")
    critic.save(out / "native", weight_format="native")
    resumed = MegatronPPOCritic(EngineConfig(**fields), critic.algorithm, parallel)
    resumed.initialize()
    resumed.load(out / "native", weight_format="native")
    tensors["resumed"] = resumed.compute_values(batch)
    if parallel.cp_size == 1 and not parallel.sequence_parallel:
        engine = MegatronLMEngine(EngineConfig(**fields, shared_prefix=True), parallel)
        engine.initialize()
        tensors["logprobs"] = engine.eval().logprobs(batch)
        stats.append(engine.train_lm(batch))
    if critic.groups.rank == 0:
        save_file(tensors, out / "out.safetensors")
        (out / "stats.json").write_text(json.dumps(stats))
    critic.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(Path(sys.argv[1]), ParallelConfig(**json.loads(sys.argv[2])), Path(sys.argv[3]))
