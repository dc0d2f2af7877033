"""Records what every layer computes for a batch: hidden states after each layer, and the experts of each token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.actor.engine import MegatronEngine
from megarl.actor.model import heads
from megarl.device_copies import to_device
from megarl.types import PackedBatch

ROWS, HIDDEN, EXPERTS = "rows", "hidden/", "experts/"


@torch.no_grad()
def layer_states(engine: MegatronEngine, batch: PackedBatch) -> dict[str, Tensor]:
    """Runs the batch forward and returns this rank's part of the records, on the host. A collective.

    `rows` int64 `[n]` are positions of this data parallel rank's tokens in the batch. `hidden/L` float32 `[n, hidden]`
    is the output of layer L, counted from 1; layer 0 is the embedding. `experts/L` `[n, experts]` is 1 at the experts
    that a router chose. Each pipeline stage returns its layers, on the first of its tensor and context parallel ranks.
    """
    microbatches = engine._microbatches(batch)
    parts: dict[str, list[Tensor]] = {}

    def record(key: str, stage: Any, output: Tensor) -> None:
        kept = parts.setdefault(key, [])
        local = to_device(microbatches[len(kept)].local, engine.device)  # a stage takes them in order
        hidden = heads.hidden_states(output, stage, engine.groups)
        kept.append((hidden if local is None else local.restore(hidden, engine.groups.cp)).cpu())

    with contextlib.ExitStack() as hooks:
        for stage in engine.stages:
            for key, module, take in _watched(stage):
                hook = _hook(key, stage, take, record)
                hooks.callback(module.register_forward_hook(hook).remove)
        engine.run_forward(microbatches, lambda output, _: output.new_zeros(1))
    if engine.groups.tp.rank() or engine.groups.cp.rank():
        return {}
    rows = [batch.token_index(mb.indices) for mb in microbatches]
    states = {
        key: torch.cat([part[: len(row)] for part, row in zip(kept, rows, strict=True)]) for key, kept in parts.items()
    }
    return {ROWS: torch.cat(rows), **states}


def _watched(stage: Any) -> Iterator[tuple[str, torch.nn.Module, Callable[[Any], Tensor]]]:
    """Yields the modules of a stage to record: key, module, and how to take `[tokens, 1, n]` from its output."""
    if stage.pre_process:
        yield f"{HIDDEN}000", stage.embedding, lambda output: output.float()
    for layer in stage.decoder.layers:
        yield f"{HIDDEN}{layer.layer_number:03d}", layer, lambda output: _first(output).float()
        for module in layer.modules():
            if isinstance(module, TopKRouter):
                yield f"{EXPERTS}{layer.layer_number:03d}", module, lambda output: output[1].float().unsqueeze(1)


def _first(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _hook(
    key: str, stage: Any, take: Callable[[Any], Tensor], record: Callable[[str, Any, Tensor], None]
) -> Callable[..., None]:
    def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
        record(key, stage, take(output))

    return hook
