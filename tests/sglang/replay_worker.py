"""An actor whose routers have drifted from the server's, and a worker that replays a server's batch on each layout.

Arguments: the model's folder, that of `batch.safetensors` and of the results, and layouts as JSON {"name": knobs}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.algorithms import GRPOConfig, algorithm_of
from megarl.parallel import groups
from megarl.parallel.broadcast import broadcast_batch
from megarl.parallel.config import ParallelConfig
from megarl.types import ROUTED_EXPERTS, PackedBatch


def actor_of(
    folder: Path, replay: str = "rollout", parallel: ParallelConfig | None = None, **knobs: Any
) -> MegatronPPOActor:
    algorithm = algorithm_of(GRPOConfig(routing_replay=replay, n_minibatches=2 if replay == "proximal" else 1))
    config = EngineConfig(
        path=str(folder), **{"max_tokens_per_mb": 100, "optimizer": OptimizerConfig(lr=1e-4), **knobs}
    )
    actor = MegatronPPOActor(config, algorithm, parallel)
    actor.initialize()
    return actor


def drift(actor: MegatronPPOActor, scale: float = 0.1) -> None:
    """Has the routers choose by scores with noise, so that they differ from the server's where two experts are close.

    Weights of the chosen experts stay those of the true scores.
    """
    assert actor._replay is not None
    generator = torch.Generator().manual_seed(3)
    for router in actor._replay.routers.values():

        def choose(*args: Any, inner: Any = router.get_replay_topk, **_: Any) -> tuple[Tensor, Tensor]:
            scores, topk, groups, group_topk, pick = args

            def noisy(values: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
                ids = pick(values + scale * torch.randn(values.shape, generator=generator), *rest, **named)[1]
                return values.gather(1, ids), ids

            return inner(scores, topk, groups, group_topk, noisy)

        router.get_replay_topk = choose  # type: ignore[method-assign]


def copy_of(batch: PackedBatch, without: str = "") -> PackedBatch:
    tokens = {key: value.clone() for key, value in batch.tokens.items() if key != without}
    return PackedBatch(batch.cu_seqlens, tokens, dict(batch.sequences))


def error(actor: MegatronPPOActor, batch: PackedBatch) -> Tensor:
    """Differences of the actor's log-probs to the server's, of the trained tokens."""
    mask = batch["loss_mask"].bool()
    return (actor.compute_logp(batch) - batch["rollout_logprobs"])[mask].abs()


def trained_on(actor: MegatronPPOActor, batch: PackedBatch) -> PackedBatch:
    """A copy of the batch with all that an update reads."""
    batch = copy_of(batch)
    batch["prox_logp"] = batch["rollout_logprobs"].clone()
    actor.compute_advantages(batch)
    return batch


def chosen(actor: MegatronPPOActor, batch: PackedBatch) -> Tensor:
    """Experts of the actor's pass over a batch, sorted, `[tokens, layers, topk]`."""
    replay, own = actor._replay, copy_of(batch)
    assert replay is not None
    with replay.recording(own):
        actor.logprobs(batch, trained_only=True)
    return own[ROUTED_EXPERTS].sort(-1).values


def measure(model: Path, batch: PackedBatch, parallel: ParallelConfig, out: Path) -> None:
    """Writes the experts of a layout's passes, the errors of its log-probs, and an update's figures."""
    proximal = actor_of(model, "proximal", parallel)
    sent = batch if proximal.groups.rank == 0 else None
    received = broadcast_batch(sent)  # as the trainer's ranks get their batches
    assert torch.equal(received[ROUTED_EXPERTS], batch[ROUTED_EXPERTS])
    batch = received
    own = copy_of(batch, without=ROUTED_EXPERTS)
    proximal.compute_logp(own)
    actor = actor_of(model, "rollout", parallel, recompute="full")
    drift(actor)
    results = {
        "proximal": own[ROUTED_EXPERTS].sort(-1).values,
        "own": chosen(actor, copy_of(batch, without=ROUTED_EXPERTS)),
        "replayed": chosen(actor, batch),
        "error": error(actor, batch),
    }
    update = actor.ppo_update(trained_on(actor, batch))
    assert actor._replay is not None
    assert all(not router.waiting for router in actor._replay.routers.values())
    if actor.groups.rank == 0:
        save_file(results, out.with_suffix(".safetensors"))
        out.with_suffix(".json").write_text(json.dumps(update))


def main(model: Path, work: Path, layouts: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    stored = load_file(work / "batch.safetensors")
    bounds = stored.pop("cu_seqlens")
    sequences = {key: value for key, value in stored.items() if len(value) == len(bounds) - 1}
    tokens = {key: value for key, value in stored.items() if key not in sequences}
    batch = PackedBatch(bounds, tokens, sequences)
    for name, knobs in layouts.items():
        measure(model, batch, ParallelConfig(**knobs), work / name)
        groups.leave_layout()
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
