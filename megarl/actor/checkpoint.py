"""Training state on disk, bit for bit: one safetensors file a rank, one JSON of facts, nothing pickled.

A checkpoint is read back by the layout that wrote it; HF exports (`hf.save`) are free of the layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.knobs import UserError
from megarl.parallel import platform
from megarl.parallel.groups import Groups


def _layout(groups: Groups) -> dict[str, int]:
    return groups.layout.sizes()


def _optimizer_tensors(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Main parameters and Adam's moments of this rank's shard. The moments exist after the first step only."""
    for chained, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = part.optimizer
        for g, group in enumerate(inner.param_groups):
            for p, param in enumerate(group["params"]):
                prefix = f"optimizer.{chained}.{g}.{p}"
                yield f"{prefix}.main", param
                state = inner.state.get(param, {})
                for key in ("exp_avg", "exp_avg_sq", "step"):
                    if key in state:
                        yield f"{prefix}.{key}", state[key]


def _create_moments(optimizer: Any, names: set[str]) -> None:
    """Adam makes its moments at its first step; a resumed run needs them before."""
    for chained, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = part.optimizer
        for g, group in enumerate(inner.param_groups):
            for p, param in enumerate(group["params"]):
                if f"optimizer.{chained}.{g}.{p}.exp_avg" in names:
                    inner.state[param] = {
                        "step": torch.zeros([], dtype=torch.float32),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }


def _model_tensors(modules: Sequence[GPTModel]) -> Iterator[tuple[str, Tensor]]:
    """Native parameters by name; those of virtual stages above the first carry its number."""
    for stage, module in enumerate(modules):
        prefix = f"model.{stage}" if stage else "model"
        for name, param in module.named_parameters():
            yield f"{prefix}.{name}", param


def save(
    folder: Path, modules: Sequence[GPTModel], optimizer: Any, scheduler: OptimizerParamScheduler, groups: Groups
) -> None:
    """Every rank writes its shard to `folder`; rank 0 writes the facts. A collective."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_model_tensors(modules))
    tensors.update(_optimizer_tensors(optimizer))
    tensors["rng.host"] = torch.get_rng_state()
    if platform.has_gpu():
        tensors["rng.device"] = torch.cuda.get_rng_state()
    host = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_file(host, folder / f"rank_{groups.rank:05d}.safetensors")
    if groups.rank == 0:
        facts = {"layout": _layout(groups), "scheduler_steps": scheduler.num_steps}
        (folder / "engine.json").write_text(json.dumps(facts, indent=2))
    dist.barrier()


def load(
    folder: Path, modules: Sequence[GPTModel], optimizer: Any, scheduler: OptimizerParamScheduler, groups: Groups
) -> None:
    """Restores what `save` wrote.

    Raises:
        UserError: the checkpoint was written by another layout, or a file of it is missing.
    """
    facts = json.loads((folder / "engine.json").read_text())
    if facts["layout"] != _layout(groups):
        raise UserError(
            f"{folder} was written with {facts['layout']}, this run has {_layout(groups)}; resume with the same layout"
        )
    file = folder / f"rank_{groups.rank:05d}.safetensors"
    if not file.is_file():
        raise UserError(f"{file} is missing; the checkpoint is not whole, resume from an earlier one")
    stored = load_file(file)
    _create_moments(optimizer, set(stored))
    live = dict(_model_tensors(modules))
    live.update(_optimizer_tensors(optimizer))
    differing = sorted(set(live) ^ {n for n in stored if not n.startswith("rng.")})
    if differing:
        raise UserError(
            f"{file} and this model differ in {differing[0]} ({len(differing)} such); is it the same model?"
        )
    for name, tensor in live.items():
        if tensor.shape != stored[name].shape:
            raise UserError(
                f"{file}: {name} has shape {tuple(stored[name].shape)}, this model's has {tuple(tensor.shape)}; "
                "resume with the same model"
            )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(stored[name])
    torch.set_rng_state(stored["rng.host"])
    if platform.has_gpu():
        torch.cuda.set_rng_state(stored["rng.device"])
    scheduler.num_steps = 0
    scheduler.step(facts["scheduler_steps"])  # the schedule itself is the run's own: it may be longer than it was
