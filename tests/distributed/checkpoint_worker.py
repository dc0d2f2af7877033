"""Worker of every rank of four: each layout loads the states of all layouts, and trains on."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.actor.checkpoint.stored_state import StoredState
from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.weights import hf_weights
from megarl.actor.weights.block_shards import is_buffer
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of

DENSE: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2dp2": {"tp_size": 2},
    "pp2dp2": {"pp_size": 2},
    "tp2pp2": {"tp_size": 2, "pp_size": 2},
    "cp2dp2": {"cp_size": 2},
    "tp2cp2": {"tp_size": 2, "cp_size": 2},
    "pp2vpp2dp2": {"pp_size": 2, "vpp_size": 2},
    "pp2uneven": {"pp_size": 2, "first_stage_layers": 3},
    "tp2sp": {"tp_size": 2, "sequence_parallel": True},
    "tp4": {"tp_size": 4},  # two ranks hold the same KV head
}
MOE: dict[str, dict[str, Any]] = {
    "dp4": {},
    "ep2": {"ep_size": 2},
    "ep4": {"ep_size": 4},
    "tp2ep2etp1": {"tp_size": 2, "ep_size": 2, "etp_size": 1, "sequence_parallel": True},
    "tp2ep2": {"tp_size": 2, "ep_size": 2, "sequence_parallel": True},
    "pp2ep2": {"pp_size": 2, "ep_size": 2},
    "ep2grouped": {"ep_size": 2, "experts": "grouped"},
    "tp2ep2grouped": {"tp_size": 2, "ep_size": 2, "sequence_parallel": True, "experts": "grouped"},
}
LENGTHS = torch.tensor([24, 16, 33, 7])
STEPS = 2


def batch() -> PackedBatch:
    total = int(LENGTHS.sum())
    ids = torch.randint(0, 330, (total,), generator=torch.Generator().manual_seed(3))
    return PackedBatch(cu_seqlens_of(LENGTHS), {"input_ids": ids, "loss_mask": torch.ones(total, dtype=torch.bool)})


def engine_of(model: Path, dtype: str, scalar: bool, layout: dict[str, Any]) -> MegatronEngine:
    optimizer, experts = OptimizerConfig(lr=1e-2, adam_eps=1e-3, weight_decay=0.1), layout.get("experts", "auto")
    config = EngineConfig(
        path=str(model), dtype=dtype, max_tokens_per_mb=48, optimizer=optimizer, value_head_std=0.1, experts=experts
    )
    parallel = ParallelConfig(**{name: size for name, size in layout.items() if name != "experts"})
    engine = MegatronEngine(config, parallel, scalar=scalar)
    engine.initialize()
    return engine


def mean_nll(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> Tensor:
    return -logprobs.mean()


def mean_square(values: Tensor, data: PackedBatch) -> Tensor:
    return (values - 1).square().mean()


def train(engine: MegatronEngine, scalar: bool) -> list[float]:
    """Takes two steps and returns their losses and gradient norms."""
    figures = []
    for _ in range(STEPS):
        if scalar:
            stats = engine.train_batch(batch(), mean_square, lambda data: data.total_tokens, loss_input="values")
        else:
            stats = engine.train_batch(batch(), mean_nll, lambda data: data.total_tokens, loss_input="logprobs")
        figures += [stats["loss"], stats["grad_norm"]]
        engine.step_lr_scheduler()
    return figures


def poison(engine: MegatronEngine) -> None:
    """Fills parameters, buffers and optimizer state with NaN. Elements that a load does not write stay NaN."""
    with torch.no_grad():
        for param in hf_weights.parameters(engine.modules):
            param.fill_(math.nan)
        for shard in engine.shards():
            if is_buffer(shard.name):
                shard.view.fill_(math.nan)
        for owned in engine._state._owned():
            for value in (owned.main, *owned.inner.state[owned.main].values()):
                value.fill_(math.nan)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def weights_equal(engine: MegatronEngine, folder: Path) -> bool:
    """True if the weights gathered from the live model equal the stored weights. Compared on rank 0."""
    stored = dict(StoredState(folder).tensors())
    live = dict(engine.named_weights())
    return engine.groups.rank != 0 or equal(live, stored)


def trains_on(engine: MegatronEngine, folder: Path, name: str, layout: str, case: dict[str, Any]) -> list[str]:
    """Lists problems of the steps after a load.

    The losses must be close to one process's, and bitwise equal after loading again.
    """
    wrong = []
    losses = train(engine, case["scalar"])
    if any(not math.isclose(a, b, rel_tol=case["tolerance"]) for a, b in zip(losses, case["losses"], strict=True)):
        wrong.append(f"{name}: {layout} trains to {losses}, one process to {case['losses']}")
    engine.load_state(folder / layout)
    if train(engine, case["scalar"]) != losses:
        wrong.append(f"{name}: {layout} trains to different bits after another load")
    return wrong


def main(work: Path) -> None:
    torch.set_num_threads(1)
    cases = json.loads((work / "cases.json").read_text())
    wrong: list[str] = []
    for name, case in cases.items():
        folder, layouts, options = work / name, case["layouts"], (case["dtype"], case["scalar"])
        for layout, sizes in layouts.items():
            engine = engine_of(folder / "model", *options, sizes)
            engine.load_state(folder / "single")
            if not weights_equal(engine, folder / "single"):
                wrong.append(f"{name}: weights of single in {layout}")
            engine.save_state(folder / layout)
            wrong += trains_on(engine, folder, name, layout, case)
            groups.leave_layout()
        for layout, sizes in layouts.items():
            engine = engine_of(folder / "model", *options, sizes)
            engine.load_state(folder / layout)
            expected = engine.snapshot_state().tensors
            for other in layouts:
                poison(engine)
                engine.load_state(folder / other)
                if not equal(engine.snapshot_state().tensors, expected):
                    wrong.append(f"{name}: {other} in {layout}")
            groups.leave_layout()
    (work / f"wrong-{engine.groups.rank}.json").write_text(json.dumps(wrong))
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
