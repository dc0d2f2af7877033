"""Worker of the negative controls: plants a layout bug in the actor and writes the figures of check=invariance.

Arguments: the work folder, and the number of ranks, whose controls run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import tensor_parallel
from safetensors.torch import save_file

from megarl.actor import engine
from megarl.actor.engine import MegatronEngine
from megarl.actor.model import build
from megarl.parallel import groups
from megarl.preflight import invariance

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def _after_building(change: Callable[[Any], None]) -> Iterator[None]:
    """Changes each module that the engine builds, behind the back of the engine's own check of the marks."""
    original = build.build_model

    def build_and_change(*args: Any) -> list[Any]:
        modules = original(*args)
        for module in modules:
            change(module)
        return modules

    with patch.object(build, "build_model", build_and_change), patch.object(engine, "check_split_marks", _passes):
        yield


def _passes(*_: Any) -> None:
    """Replaces the engine's check of the marks."""


def _mark(part: str, value: bool) -> Callable[[Any], None]:
    """Sets Megatron's tensor-parallel mark of the parameters with `part` in their names."""

    def change(module: Any) -> None:
        for name, parameter in module.named_parameters():
            if part in name:
                parameter.tensor_model_parallel = value

    return change


def _forget_qk_norm(module: Any) -> None:
    """Has Megatron take the norms of queries and keys for complete: their gradients stay partial."""
    module.config.qk_layernorm = False


@contextlib.contextmanager
def _sum_complete_gradients() -> Iterator[None]:
    """Has Megatron sum gradients over tp that are complete, those of the layers' input norms."""

    def change(module: Any) -> None:
        for name, parameter in module.named_parameters():
            if "input_layernorm" in name:
                parameter.sequence_parallel = True
        finalize = engine.data_parallel.finalize_model_grads

        def with_sequence_parallel(models: Any, *args: Any, **options: Any) -> None:
            module.config.sequence_parallel = True
            finalize(models, *args, **options)
            module.config.sequence_parallel = False

        patcher = patch.object(engine.data_parallel, "finalize_model_grads", with_sequence_parallel)
        patcher.start()
        undo.callback(patcher.stop)

    with contextlib.ExitStack() as undo, _after_building(change):
        yield


@contextlib.contextmanager
def _local_token_counts() -> Iterator[None]:
    """Divides each dp rank's loss by the rank's own number of tokens instead of the batch's."""
    original = MegatronEngine._microbatches

    def local(self: Any, *args: Any) -> list[Any]:
        microbatches = original(self, *args)
        share = sum(mb.weight for mb in microbatches) * self.groups.dp_size
        return [dataclasses.replace(mb, weight=mb.weight / share) for mb in microbatches]

    with patch.object(MegatronEngine, "_microbatches", local):
        yield


@contextlib.contextmanager
def _experts_by_tp_rank() -> Iterator[None]:
    """Asks the tp group which rank counts an expert's gradients, as Megatron before 0.19.0, for unmarked experts."""
    original = tensor_parallel.param_is_not_tensor_parallel_duplicate

    def by_tp_rank(param: Any, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
        return bool(original(param, tp_group, None))

    with (
        patch.object(tensor_parallel, "param_is_not_tensor_parallel_duplicate", by_tp_rank),
        _after_building(_mark(".experts.", False)),
    ):
        yield


# name -> (case of check=invariance, bug to plant)
CONTROLS: dict[str, tuple[str, Plant]] = {
    "none": ("tp1", contextlib.nullcontext),
    "none, moe": ("moe tp1", contextlib.nullcontext),
    "split parameter without mark": ("tp2", lambda: _after_building(_mark("linear_fc2.weight", False))),
    "replicated parameter with mark": ("tp2", lambda: _after_building(_mark("final_layernorm", True))),
    "partial gradients": ("tp2", lambda: _after_building(_forget_qk_norm)),
    "complete gradients summed": ("tp2", _sum_complete_gradients),
    "experts counted by tp rank": ("moe tp2 sp ep2", _experts_by_tp_rank),
    "local token counts": ("dp2", _local_token_counts),
}


def ranks_of(control: str) -> int:
    return invariance.CASES[CONTROLS[control][0]].ranks


def main(work: Path, world: int) -> None:
    torch.set_num_threads(1)
    for control, (name, plant) in CONTROLS.items():
        if ranks_of(control) == world:
            case = invariance.CASES[name]
            with plant():
                figures = invariance.measure(invariance.build_actor(case, work / case.model), invariance.batch())
            if torch.distributed.get_rank() == 0:
                save_file(figures, work / f"{control}.safetensors")
            groups.leave_layout()
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
