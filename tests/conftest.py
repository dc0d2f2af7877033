"""What every test stands on: tiny checkpoints in the families' own formats, and a check that nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

# A job in the background may be started with Ctrl-C ignored, and its children inherit that; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

FAMILY_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
EXPERTS: dict[str, dict[str, Any]] = {  # what a mixture of experts has besides
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}


def random_model(family: str, *, tied: bool, vocab_size: int = 343, seed: int = 0, **fields: Any) -> torch.nn.Module:
    """A random fp32 model: 2 layers, hidden 64, 4 heads on 2 KV heads. Norms and biases are random too."""
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        **({} if family == "qwen2" else {"head_dim": 16}),
        **EXPERTS.get(family, {}),
        **fields,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILY_CONFIGS[family](**shape), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints("qwen3", tied=True, ...)`: the folder of a random model, written by transformers."""
    made: dict[tuple[Any, ...], Path] = {}

    def folder(family: str, **fields: Any) -> Path:
        key = (family, *sorted((k, str(v)) for k, v in fields.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            random_model(family, **fields).save_pretrained(made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails the session when a process that a test started is still there after the last test."""
    before = {p.pid for p in psutil.process_iter()}
    yield
    left = [p for p in psutil.Process(os.getpid()).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    marks = ("megarl", "sglang")
    orphans = []
    for process in psutil.process_iter(["ppid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        adopted = process.pid not in before and process.info["ppid"] == 1
        if adopted and any(m in line for m in marks) and "pytest" not in line:
            orphans.append(process)
    names = [f"{p.pid}: {' '.join(p.cmdline())[:120]}" for p in left if "resource_tracker" not in " ".join(p.cmdline())]
    assert not names, f"tests left processes behind: {names}"
    assert not orphans, f"tests left orphans behind: {orphans}"


@pytest.fixture(scope="module", autouse=True)
def no_world_stays() -> Iterator[None]:
    """A world that a module's tests made in this process ends with them."""
    yield
    if groups := sys.modules.get("megarl.parallel.groups"):
        groups.destroy()
