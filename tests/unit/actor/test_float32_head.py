"""Logits of bfloat16 models in float32 (`actor.float32_head`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.actor.batch.microbatch import Labels
from megarl.actor.config import EngineConfig
from megarl.actor.supervised import MegatronLMEngine
from megarl.types import PackedBatch, cu_seqlens_of


def texts() -> PackedBatch:
    lengths = torch.tensor([17, 30, 5, 9])
    tokens = int(lengths.sum())
    ids = torch.randint(0, 343, (tokens,), generator=torch.Generator().manual_seed(0))
    return PackedBatch(cu_seqlens_of(lengths), {"input_ids": ids, "loss_mask": torch.ones(tokens, dtype=torch.bool)})


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("kept_logits_mb", [0, 256])
def test_a_float32_head_rounds_the_loss_less(checkpoints: Callable[..., Path], kept_logits_mb: int) -> None:
    """Against logits in float64 of the engine's own hidden states; with logits kept, and computed again."""
    folder = checkpoints("qwen3", tied=True, vocab_size=343)
    batch, errors = texts(), {}
    for wide in (True, False):
        config = EngineConfig(str(folder), dtype="bfloat16", float32_head=wide, kept_logits_mb=kept_logits_mb)
        engine = MegatronLMEngine(config)
        engine.initialize()
        project, exact = engine.backend.logprobs, []

        def recorded(
            hidden: Tensor, labels: Labels, weight: Tensor, *more: Any, project: Any = project, exact: Any = exact
        ) -> Any:
            table = (hidden.double() @ weight.double().t())[:, :343].log_softmax(-1)
            ids = labels.ids
            exact.append((table.gather(1, ids.clamp(min=0)[:, None]).squeeze(1) * (ids != -1)).detach())
            return project(hidden, labels, weight, *more)

        engine.backend = dataclasses.replace(engine.backend, logprobs=recorded)
        stats = engine.train_lm(batch)
        trained = int((torch.cat(exact) != 0).sum())
        errors[wide] = abs(stats["loss"] + float(torch.cat(exact).sum()) / trained)
        assert stats["grad_norm"] > 0
    assert errors[True] < 1e-5
    assert errors[True] * 10 < errors[False]
