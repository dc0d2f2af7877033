"""With `parallel.overlap` the hook before a module gathers its parameters. So the modules of all of them must run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megarl.actor.config import EngineConfig, LoraConfig
from megarl.actor.engine import MegatronEngine
from megarl.types import PackedBatch, cu_seqlens_of

AWAITED = {"output_layer.weight"}  # `data_parallel.await_parameter`: the head is applied without its module
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v3": {},
    "qwen3_next": {},
}


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_module_of_every_trained_parameter_runs(family: str, rank: int, checkpoints: Callable[..., Path]) -> None:
    path = checkpoints(family=family, tied=family == "gemma3_text", **FAMILIES[family])
    engine = MegatronEngine(EngineConfig(path=str(path), backend="torch", lora=LoraConfig(rank=rank)))
    engine.initialize()
    ran: set[nn.Module] = set()
    modules = {name: module for stage in engine.modules for name, module in stage.named_modules()}
    for module in modules.values():
        module.register_forward_pre_hook(lambda module, _: ran.add(module))
    ids = torch.arange(12) % 7
    engine.eval().logprobs(PackedBatch(cu_seqlens_of(torch.tensor([7, 5])), {"input_ids": ids, "loss_mask": ids > 0}))
    passed_by = {
        f"{name}.{leaf}"
        for name, module in modules.items()
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad and module not in ran
    }
    engine.destroy()
    assert passed_by <= AWAITED
