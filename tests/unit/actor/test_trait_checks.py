"""Windows, sinks and biases of experts are honoured or refused in one line, never left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl import cli
from megarl.actor.checks import model_checks
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.checks import failures
from megarl.checks import model_checks as run_checks
from megarl.families import read_config
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import OFF, same_bits

ON_CPU = pytest.mark.cpu_options("servers on CPUs")
ON_GPU = ["server.device=cuda", "server.dtype=bfloat16"]
ADAPTERS = ["actor.lora.rank=4", "actor.lora.sync=adapters"]
WINDOW = {"mistral": {"sliding_window": 9}, "gemma3_text": {"sliding_window": 9}, "gpt_oss": {}, "qwen3": {}}


@pytest.mark.parametrize(
    ("family", "config", "parallel", "deterministic", "message"),
    [
        (
            "mistral",
            {},
            {},
            True,
            "no row-invariant attention with a sliding window of 9 tokens",
        ),
        ("gpt_oss", {}, {}, True, "deterministic=true has no row-invariant attention with attention sinks"),
        (
            "gpt_oss",
            {"backend": "te"},
            {"cp_size": 2},
            False,
            "parallel.cp_size=2 on Transformer Engine's layers",
        ),
        ("gemma3_text", {"dtype": "bfloat16", "shared_prefix": True}, {}, False, "actor.shared_prefix=true on Transf"),
        ("gemma3_text", {"backend": "torch", "shared_prefix": True}, {}, False, None),
        ("mistral", {"backend": "torch"}, {"cp_size": 2}, False, None),
        ("qwen3", {"backend": "te"}, {"cp_size": 2}, False, None),
        ("gpt_oss", {}, {"tp_size": 2, "sequence_parallel": True}, False, "parallel.etp_size=2 cuts experts"),
        ("gpt_oss", {}, {"tp_size": 2, "sequence_parallel": True, "etp_size": 1, "ep_size": 2}, False, None),
    ],
)
def test_what_a_backend_or_layout_would_leave_out_is_refused(
    family: str,
    config: dict[str, Any],
    parallel: dict[str, Any],
    deterministic: bool,
    message: str | None,
    checkpoints: Callable[..., Path],
) -> None:
    model = read_config(str(checkpoints(family, tied=family == "gemma3_text", **WINDOW[family])))
    checks = model_checks(
        EngineConfig(path="x", **config), ParallelConfig(**parallel), model, same_bits(1) if deterministic else OFF
    )
    messages = failures(checks)
    assert all("\n" not in text for text in messages)
    assert any(message in text for text in messages) if message else messages == []


@pytest.mark.parametrize(
    ("family", "fields", "server", "message"),
    [
        ("mistral", {"sliding_window": 60}, [], None),
        ("mistral", {"sliding_window": 59}, [], "no sliding windows for mistral, and this model's of 59"),
        ("gemma3_text", {"sliding_window": 9}, [], None),
        ("gpt_oss", {}, [], "SGLang's attention on CPUs and in float32 has no sinks, as this gpt_oss model has"),
        ("gpt_oss", {}, ON_GPU, None),
        ("qwen3_5_text", {}, ON_GPU, "no class for a checkpoint of type qwen3_5_text alone; give the multimodal one"),
        pytest.param("qwen3_next", {}, [], "SGLang does not serve qwen3_next on CPUs", marks=ON_CPU),
        ("qwen3_next", {}, ON_GPU, None),
        pytest.param(
            "qwen3_5_text", {"architectures": None}, [], "SGLang does not serve qwen3_5 on CPUs", marks=ON_CPU
        ),
        ("qwen3_5_text", {"architectures": None}, ON_GPU, None),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ON_GPU, "weights quantised by 'mxfp4', and"),
        ("llama", {}, ADAPTERS, None),
        ("qwen3_moe", {}, ADAPTERS, "SGLang's pool of adapters is known for qwen2, qwen3, llama, mistral, not for"),
    ],
)
def test_rollouts_of_another_model_than_the_trainers_are_refused(
    family: str, fields: dict[str, Any], server: list[str], message: str | None, checkpoints: Callable[..., Path]
) -> None:
    """Sequences have up to 60 tokens."""
    model = read_config(str(checkpoints(family, tied=family == "gemma3_text")))
    vars(model).update(fields)
    arguments = ["+experiment=gsm8k_grpo", "train_dataset.max_length=40", "gconfig.max_new_tokens=20", *server]
    found = [
        text for text in failures(run_checks(cli.load(arguments), model)) if "SGLang" in text or "quantised" in text
    ]
    assert [message in text for text in found] == [True] if message else found == []


@pytest.mark.cpu_options("actor.backend=cpu")
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "mistral"])
def test_the_kernels_of_the_cpu_leave_windows_to_plain_attention(family: str, checkpoints: Callable[..., Path]) -> None:
    """Grouped experts too, whose biases are parameters of one module."""
    folder = checkpoints(family, tied=family == "gemma3_text", **WINDOW[family])
    ids = torch.randint(0, 343, (2, 29), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        table = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[:, :-1].log_softmax(-1)
    knobs = {"experts": "grouped"} if family == "gpt_oss" else {}
    engine = MegatronEngine(EngineConfig(path=str(folder), backend="cpu", **knobs))
    engine.initialize()
    try:
        logprobs = engine.eval().logprobs({"input_ids": ids}).view(2, 29)
    finally:
        groups.destroy()
    torch.testing.assert_close(logprobs[:, 1:], table.gather(-1, ids[:, 1:, None])[..., 0], rtol=0, atol=1e-5)
