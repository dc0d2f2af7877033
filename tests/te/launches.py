"""Counts the operations of a layer of experts in forward and backward, on the stand-in of Transformer Engine.

Argument: a model's folder; the stand-in is on `sys.path`. Prints JSON: operations by how experts are computed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from typing import Any

import torch
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.transformer.moe.moe_layer import MoELayer
from transformer_engine.kernels import Launches, kernel

from megarl.actor import engine as engines
from megarl.actor.config import EngineConfig
from megarl.parallel import platform

TOKENS = 256
COMPILED = ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back")  # a kernel each on a GPU


def as_one_kernel(name: str) -> None:
    """Counts a compiled function of Megatron as one operation."""
    run = getattr(fused_bias_swiglu, name)

    def counted(*args: Any) -> Any:
        with kernel(name):
            return run(*args)

    setattr(fused_bias_swiglu, name, counted)


def layer_of(folder: str, *, experts: str, fused: bool) -> MoELayer:
    """The first layer of experts of a model under `te`."""
    engine = engines.MegatronEngine(
        EngineConfig(path=folder, init="random", backend="te", dtype="bfloat16", experts=experts)
    )
    engine.backend = dataclasses.replace(engine.backend, fused_permutation=fused, fused_routing=fused)
    engine.initialize()
    layers: list[MoELayer] = [m for m in engine.ddps[0].modules() if isinstance(m, MoELayer)]
    return layers[0]


def operations(layer: MoELayer) -> Counter[str]:
    """Operations of one microbatch by name; a gradient's sum into the main gradient is one for each parameter."""
    x = torch.randn(TOKENS, 1, layer.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones_like(x)
    with Launches() as launches:
        out, _ = layer(x)
        torch.autograd.backward(out, gradient)
    return launches.counts


def main(folder: str) -> None:
    platform.takes_gpu_options = lambda: True
    for name in COMPILED:
        as_one_kernel(name)
    one_by_one = layer_of(folder, experts="sequential", fused=False)
    grouped = layer_of(folder, experts="grouped", fused=True)
    counts = {"one by one": operations(one_by_one), "grouped": operations(grouped)}
    print(json.dumps({name: {"total": sum(c.values()), **dict(c.most_common())} for name, c in counts.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
