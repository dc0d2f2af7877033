"""Worker of every rank: computes loss and gradient norm of every method under each layout, on one batch.

Arguments: the work folder (batch in, results out), and the layouts as JSON {"name": {parallel knobs}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.critic import MegatronScalarEngine
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.supervised import lm_loss, trained_tokens
from megarl.algorithms import ALGORITHMS, RLConfig, algorithm_of
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch

KNOBS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"aggregate_tokens": 40},
    "gspo": {"clip_low": 0.03, "clip_high": 0.04},  # clips some of the sequences
}
RL_KNOBS = {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3", "entropy_coef": 0.01}


def method_config(name: str) -> Any:
    """Builds the method's knobs. RL methods have a KL to the reference and an entropy bonus in their loss."""
    kind, _ = ALGORITHMS[name]
    return kind(**{**(RL_KNOBS if issubclass(kind, RLConfig) else {}), **KNOBS.get(name, {})})


def measure(folder: Path, parallel: ParallelConfig) -> dict[str, list[float]]:
    """Computes loss and gradient norm by method.

    The learning rate is so small that weights hardly change, so all methods run on one engine.
    """
    stored = load_file(folder / "batch.safetensors")
    cu_seqlens = stored.pop("cu_seqlens")
    num_seqs = cu_seqlens.numel() - 1
    tokens = {key: value for key, value in stored.items() if value.shape[0] != num_seqs}
    batch = PackedBatch(cu_seqlens, tokens, {key: value for key, value in stored.items() if key not in tokens})
    config = EngineConfig(
        path=str(folder / "model"),
        max_tokens_per_mb=150,
        value_head_std=0.5,
        optimizer=OptimizerConfig(lr=1e-30, clip_grad=0.0),
    )
    policy = MegatronPPOActor(config, algorithm_of(method_config("grpo")), parallel)
    scalar = MegatronScalarEngine(config, parallel)
    for engine in (policy, scalar):
        engine.initialize()
        engine.train()
    figures = {}

    def step(name: str, engine: MegatronEngine, loss: Any, weight: Any, loss_input: Any) -> None:
        stats = engine.train_batch(batch, loss, weight, loss_input=loss_input)
        figures[name] = [stats["loss"], stats["grad_norm"]]

    # Old log-probs are near the policy's, so some tokens are clipped and others are not.
    current = policy.eval().logprobs(batch, trained_only=True)
    for key in ("prox_logp", "ref_logp", "rollout_logprobs", "teacher_logp"):
        batch[key] = (current + batch[f"{key}_noise"]) * batch["loss_mask"]
    policy.train()
    step("sft", policy, lm_loss, trained_tokens, "logprobs")
    for name in ALGORITHMS:
        algorithm = algorithm_of(method_config(name))
        if name == "reward_model":
            step(name, scalar, algorithm.loss, algorithm.loss_weight, "values")
            continue
        if hasattr(algorithm, "advantages"):
            batch["advantages"] = algorithm.advantages(batch)
        step(name, policy, algorithm.loss, algorithm.loss_weight, "logprobs")
        if name == "ppo":
            step("ppo's critic", scalar, algorithm.value_loss, algorithm.value_loss_weight, "values")
    del batch.tokens["prox_logp"]
    stats = policy.ppo_update(batch)
    assert torch.allclose(batch["prox_logp"], current * batch["loss_mask"], atol=1e-6, rtol=1e-6)
    figures["an update that finds prox_logp"] = [stats["loss"], stats["grad_norm"]]
    return figures


def main(work: Path, layouts: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for name, knobs in layouts.items():
        figures = measure(work, ParallelConfig(**knobs))
        if dist.get_rank() == 0:
            (work / f"{name}.json").write_text(json.dumps(figures))
        groups.leave_layout()
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
