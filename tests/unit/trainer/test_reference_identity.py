"""Stored log-probs of a reference are read again only for the model that gave them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.actor.config import EngineConfig, LoraConfig
from megarl.trainer.reference_logprobs import _identity


@pytest.mark.parametrize(
    "knobs",
    [
        {"lora": LoraConfig(rank=4, quantization="nf4")},
        {"float32_head": True},
        {"temperature": 0.5},
        {"dtype": "bfloat16"},
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_another_reference_has_another_identity(knobs: dict[str, Any], checkpoints: Callable[..., Path]) -> None:
    plain = EngineConfig(path=str(checkpoints("qwen3", tied=True)), lora=LoraConfig(rank=4))
    assert _identity(plain, []) == _identity(replace(plain, lora=LoraConfig(rank=8)), [])
    assert _identity(plain, []) != _identity(replace(plain, **knobs), [])
