"""With `parallel.overlap` the hook before a module gathers its parameters. So the modules of all of them must run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import nn

from megarl.actor import data_parallel
from megarl.actor.config import EngineConfig, LoraConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel.config import ParallelConfig
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


def test_routers_wait_for_gates_that_are_read_before_their_modules_run(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where shared experts run beside the exchange of tokens. Here they are left out: they need streams of a GPU."""
    waits: list[torch.Tensor] = []
    monkeypatch.setattr(MoELayer, "shared_expert_overlap", property(lambda _: True, lambda *_: None), raising=False)
    monkeypatch.setattr(MoETokenDispatcher, "set_shared_experts", lambda *_: None)
    monkeypatch.setattr(data_parallel, "await_parameter", lambda _, parameter: waits.append(parameter))
    path = checkpoints(family="qwen3_next", tied=False)
    engine = MegatronEngine(EngineConfig(path=str(path), backend="torch"), ParallelConfig(overlap=True))
    engine.initialize()
    layers = [module for stage in engine.modules for module in stage.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        waits.clear()
        layer.router(torch.ones(1, 1, layer.config.hidden_size))
        assert [id(parameter) for parameter in waits] == [id(layer.shared_experts.gate_weight)]
    engine.destroy()
    assert len(layers) > 1
