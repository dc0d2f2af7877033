"""Worker of every rank: breaks one rank, or poisons its loss or gradient, and writes the outcome."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.health import NonFiniteError
from megarl.actor.supervised import MegatronLMEngine, lm_loss, trained_tokens
from megarl.parallel import groups, watchdog
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of

RANK = int(os.environ.get("RANK", "0"))
LAYOUTS = {"dp2": {"dp_size": 2}, "pp2": {"pp_size": 2}, "tp2": {"tp_size": 2}}
MAX_SKIPPED = 2  # in a row


def batch() -> PackedBatch:
    lengths = torch.tensor([9, 14, 7, 21])
    total = int(lengths.sum())
    ids = torch.randint(0, 343, (total,), generator=torch.Generator().manual_seed(3))
    return PackedBatch(cu_seqlens_of(lengths), {"input_ids": ids, "loss_mask": torch.ones(total, dtype=torch.bool)})


def engine_of(model: str, layout: dict[str, int], timeout_s: float = 600.0) -> MegatronLMEngine:
    config = EngineConfig(path=model, max_skipped_steps=MAX_SKIPPED, optimizer=OptimizerConfig(lr=1e-3))
    engine = MegatronLMEngine(config, ParallelConfig(**layout, timeout_s=timeout_s))
    engine.initialize()
    return engine


def broken(how: str, model: str, out: Path, timeout_s: float) -> None:
    """Trains until rank 1 is killed, stopped, or sleeps, inside the loss function of its second step.

    It makes the file `breaking` just before.
    """
    engine = engine_of(model, LAYOUTS["dp2"], timeout_s)
    if "MEGARL_TEST_WATCH" in os.environ:  # there is no launcher with a watchdog
        watchdog.start(Path(os.environ["MEGARL_TEST_WATCH"]), RANK, 2, timeout_s, guard=True)
    steps = 0

    def loss_fn(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> Any:
        if RANK == 1 and steps == 1:
            print("breaking now", flush=True)
            (out / "breaking").touch()
            if how == "sleep":
                time.sleep(600)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        return lm_loss(logprobs, entropy, data)

    with watchdog.stage("update"):
        for steps in range(3):  # noqa: B007  (the loss function reads it)
            engine.train_batch(batch(), loss_fn, trained_tokens, loss_input="logprobs")


def state_of(engine: MegatronLMEngine) -> list[Tensor]:
    """Copies this rank's parameters and its optimizer's parameters and states."""
    tensors = [p for module in engine.modules for p in module.parameters()]
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                tensors += [param, *part.optimizer.state.get(param, {}).values()]
    return [tensor.detach().clone() for tensor in tensors]


def poisoned_step(engine: MegatronLMEngine, where: str, rank: int) -> dict[str, Any]:
    """Takes a step in which only `rank` has a NaN, in its loss or in the gradient of a norm replicated over tp."""

    def nan_loss(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> Any:
        return lm_loss(logprobs * (float("nan") if rank == RANK else 1.0), entropy, data)

    before, hooks = state_of(engine), []
    if where == "gradient" and rank == RANK:
        norm = next(p for m in engine.modules for n, p in m.named_parameters() if "layernorm" in n)
        hooks.append(norm.register_hook(lambda gradient: gradient * float("nan")))
    stats = engine.train_batch(batch(), nan_loss if where == "loss" else lm_loss, trained_tokens, loss_input="logprobs")
    for handle in hooks:
        handle.remove()
    untouched = all(torch.equal(a, b) for a, b in zip(before, state_of(engine), strict=True))
    return {"skipped": stats["skipped_steps"], "untouched": untouched}


def poisoned(model: str) -> dict[str, Any]:
    """Runs, by layout, steps with a NaN on one rank and normal steps between them."""
    results = {}
    for name, layout in LAYOUTS.items():
        engine = engine_of(model, layout)
        rows = [engine.train_lm(batch())]
        for where in ("loss", "gradient"):
            for rank in (0, 1):
                if (name, where, rank) == ("pp2", "loss", 0):
                    continue  # the first stage has no loss
                row = poisoned_step(engine, where, rank)
                rows += [{**row, "case": f"{where} of rank {rank}"}, engine.train_lm(batch())]
        results[name] = {"rows": rows, "stopped": stops_after(engine.train_batch)}
        del engine
        groups.leave_layout()
    return results


def stops_after(train_batch: Callable[..., dict[str, float]]) -> Any:
    """Counts steps with a NaN loss before the run stops. Returns the count and the error message."""
    for taken in range(10):
        try:
            train_batch(batch(), lambda lp, ent, data: lp.sum() * float("nan"), trained_tokens, loss_input="logprobs")
        except NonFiniteError as error:
            return [taken, str(error)]
    return None


if __name__ == "__main__":
    how, model_folder, out, deadline = sys.argv[1:5]
    torch.set_num_threads(1)
    if how == "poison":
        (Path(out) / f"rank_{RANK}.json").write_text(json.dumps(poisoned(model_folder)))
    else:
        broken(how, model_folder, Path(out), float(deadline))
