"""Worker of every rank: trains two policies and a critic alone, then in turn on one base, and writes their digests.

Arguments: the work folder, layouts as JSON {"name": {parallel knobs}}, and their models as JSON {"name": [model]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.actor.api import FinetuneSpec
from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.critic import MegatronPPOCritic
from megarl.actor.engine import MegatronEngine
from megarl.actor.gpu.offload import PARTS, EngineMemory
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.weights.hf_weights import named_tensors
from megarl.algorithms import ALGORITHMS, algorithm_of
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of
from tests.distributed.layout_worker import run_layouts

STEPS, VOCABULARY = 3, 352
LENGTHS = torch.tensor([9, 14, 7, 21, 11, 6, 16, 12])
SPEC = FinetuneSpec(1, 2 * STEPS, 1)
# By name of an engine: its adapters and its optimizer. They are different in everything that may differ on one base.
ENGINES: dict[str, tuple[LoraConfig, OptimizerConfig]] = {
    "first": (LoraConfig(rank=4, alpha=6.0), OptimizerConfig(lr=1e-2, clip_grad=1.0)),
    "second": (
        LoraConfig(rank=8, alpha=4.0, dropout=0.2, init_seed=5),
        OptimizerConfig(lr=3e-3, lr_decay_style="linear", warmup_steps=1),
    ),
    "critic": (LoraConfig(rank=4, alpha=6.0), OptimizerConfig(lr=5e-3)),
}


def digest(tensor: Tensor) -> str:
    copy = tensor.detach().flatten().clone()  # memory that numpy has seen cannot be given up
    return sha256(copy.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def batch_of(seed: int) -> PackedBatch:
    generator, tokens = torch.Generator().manual_seed(seed), int(LENGTHS.sum())
    mask = torch.cat([torch.arange(int(n)) for n in LENGTHS]) >= 3
    figures = {
        name: -5 + 0.4 * torch.randn(tokens, generator=generator)
        for name in ("rollout_logprobs", "ref_logp", "values", "returns")
    }
    return PackedBatch(
        cu_seqlens_of(LENGTHS),
        {
            "input_ids": torch.randint(0, VOCABULARY, (tokens,), generator=generator),
            "loss_mask": mask,
            "advantages": torch.randn(tokens, generator=generator) * mask,
            **figures,
        },
        {"group_ids": torch.arange(8) // 4},
    )


def engine_of(name: str, model: Path, parallel: ParallelConfig, base: MegatronEngine | None = None) -> Any:
    """Starts the engine of this name, alone or on another one's base."""
    lora, optimizer = ENGINES[name]
    config = EngineConfig(path=str(model), max_tokens_per_mb=60, value_head_std=0.1, lora=lora, optimizer=optimizer)
    if name == "critic":
        engine: Any = MegatronPPOCritic(config, algorithm_of(ALGORITHMS["ppo"][0]()), parallel)
    else:
        engine = MegatronPPOActor(config, algorithm_of(ALGORITHMS["grpo"][0]()), parallel)
    engine.initialize(ft_spec=SPEC, base=base)
    return engine


def step(engine: Any, name: str, number: int) -> list[Any]:
    """Updates on a batch of the engine's own. Returns the metrics, and a digest of log-probs or values afterwards."""
    seed = 10 * number + list(ENGINES).index(name)
    stats = engine.train().ppo_update(batch_of(seed))
    engine.step_lr_scheduler()
    read = engine.compute_values if name == "critic" else engine.compute_logp
    return [{key: repr(value) for key, value in stats.items()}, digest(read(batch_of(seed)))]


def state_of(engine: Any, out: Path) -> dict[str, str]:
    """Digests of the rank's adapters, of the optimizer's state, of the files of PEFT, and of all merged weights."""
    engine.save(out)
    found = {f"{box.name} {box.start}": digest(box.view) for box in engine._weights.lora.shards()}
    found |= {f"state {name}": digest(tensor) for name, tensor in engine.snapshot_state().tensors.items()}
    found |= {name: digest(tensor) for name, tensor in engine.named_weights() if tensor.numel()}
    if engine.groups.rank == 0:
        found |= {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}
    return found


def frozen(engine: MegatronEngine) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters that are not trained, and the buffers of the checkpoint."""
    for stage in engine.stages:
        for name, tensor in named_tensors(stage).items():  # type: ignore[arg-type]
            if not tensor.requires_grad:
                yield name, tensor


def measure(folder: Path, parallel: ParallelConfig, out: Path) -> None:
    """Computes and writes what the test compares, for one checkpoint and one layout."""
    model, alone, together = folder / "model", {}, {}
    for name in ENGINES:
        engine = engine_of(name, model, parallel)
        steps = [step(engine, name, number) for number in range(STEPS)]
        alone[name] = [steps, state_of(engine, out / f"alone_{name}")]
        del engine
    first = engine_of("first", model, parallel)
    before = {name: (tensor.data_ptr(), digest(tensor)) for name, tensor in frozen(first)}
    engines = {"first": first, **{name: engine_of(name, model, parallel, first) for name in ("second", "critic")}}
    facts: dict[str, Any] = {"frozen": len(before)}
    for name, engine in engines.items():
        facts[f"own frozen of {name}"] = [key for key, x in frozen(engine) if before[key][0] != x.data_ptr()]
    memory = [EngineMemory(engine) for engine in engines.values()]
    done: dict[str, list[Any]] = {name: [] for name in engines}
    for number in range(STEPS):
        for name, engine in engines.items():
            done[name].append(step(engine, name, number))
        if number == 0:
            engines["second"].save_state(out / "state")
        for each in memory:
            each.offload(*PARTS)
        for each in memory[:: 1 if number else -1]:
            each.restore(*PARTS)
    for name, engine in engines.items():
        together[name] = [done[name], state_of(engine, out / f"together_{name}")]
    facts["changed"] = [name for name, tensor in frozen(first) if before[name][1] != digest(tensor)]
    second, others = engines["second"], [state_of(engines[name], out / "again") for name in ("first", "critic")]
    second.load_state(out / "state")
    resumed = [step(second, "second", number) for number in range(1, STEPS)]
    facts["resumed"] = [done["second"][:1] + resumed, state_of(second, out / "resumed")] == together["second"]
    again = [state_of(engines[name], out / "again") for name in ("first", "critic")]
    facts["others as before"] = again == others
    second.destroy()
    facts["goes on"] = step(first, "first", STEPS)[0]["skipped_steps"]
    (out / f"rank_{first.groups.rank}.json").write_text(
        json.dumps({"alone": alone, "together": together, "facts": facts})
    )


if __name__ == "__main__":
    run_layouts(measure, Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
