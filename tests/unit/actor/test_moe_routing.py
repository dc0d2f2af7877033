"""Mixtures of experts weigh their experts as transformers does, whether weights are normalised or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.actor.config import EngineConfig
from megarl.actor.supervised import MegatronLMEngine
from megarl.types import PackedBatch, cu_seqlens_of

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    ],
    ids=["mixtral", "normalised", "not normalised", "three experts"],
)
def test_logits_equal_transformers(checkpoints: Callable[..., Path], family: str, fields: dict[str, Any]) -> None:
    folder = checkpoints(family, tied=False, **fields)
    engine = MegatronLMEngine(EngineConfig(path=str(folder)))
    engine.initialize()
    ids = torch.randint(0, 343, (24,), generator=torch.Generator().manual_seed(0))
    logits = engine.eval().forward(PackedBatch(cu_seqlens_of(torch.tensor([24])), {"input_ids": ids}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids[None]).logits[0], rtol=1e-3, atol=2e-4)
