"""The forms of `deterministic=true`: which one a run has, what it refuses, and what its processes set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl import checks, cli
from megarl.actor.checks import device_checks, knob_checks, model_checks
from megarl.actor.config import EngineConfig
from megarl.families import read_config
from megarl.knobs import UserError, run_all
from megarl.parallel import determinism, platform
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import BY_LIBRARY, OFF, same_bits

ROOT = Path(__file__).parents[3]
RUN = ["+experiment=gsm8k_grpo", "deterministic=true"]
ON_GPU = ["cluster.gpus_per_node=8", "server.dtype=bfloat16", "actor.dtype=bfloat16"]
TINY = cli.ASSETS / "tiny"


def form_of(*overrides: str) -> determinism.Determinism:
    return cli.composed(list(overrides)).determinism


def problems(*overrides: str) -> list[str]:
    """What the checks without a model say about a run on GPUs."""
    return checks.failures(checks.config_checks(cli.composed([*RUN, *ON_GPU, *overrides])))


def test_the_trainers_device_chooses_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "takes_gpu_options", lambda: False)
    assert form_of("+experiment=gsm8k_grpo", *ON_GPU) == OFF
    assert form_of(*RUN, "server.tp_size=4", "parallel.tp_size=2") == same_bits(4)
    assert form_of(*RUN, *ON_GPU) == BY_LIBRARY
    monkeypatch.setattr(platform, "takes_gpu_options", lambda: True)
    assert form_of(*RUN) == BY_LIBRARY


def test_a_run_on_gpus_may_have_any_layout_and_routing_replay() -> None:
    assert problems() == []
    assert problems("server.tp_size=3", "parallel.tp_size=2", "server.dtype=float16") == []
    config = cli.composed([*RUN, *ON_GPU, "server.tp_size=2", "parallel.tp_size=2"])
    assert checks.failures(checks.model_checks(config, read_config(str(TINY)))) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("server.dtype=float32", "server.dtype=float32 must be bfloat16 or float16 with deterministic=true on GPUs"),
        ("server.kv_cache_dtype=fp8_e4m3", "server.kv_cache_dtype=fp8_e4m3 must be auto with deterministic=true"),
        ("server.device=cpu", "whose servers are on devices like the trainer's, which runs on GPUs"),
        (
            "actor.moe_dispatcher=flex",
            "receives tokens in the order of their arrival, and deterministic=true adds",
        ),
        ("actor.fp8=blockwise", "and not with deterministic=true"),
        ("parallel.tp_comm_overlap=true", "shared_prefix and deterministic to false"),
        ("+sglang.attention_backend=trtllm_mha", "it must be fa3 or fa4 or flashinfer or triton"),
        ("+sglang.decode_attention_backend=torch_native", "others split keys by the batch"),
        ("+sglang.sampling_backend=flashinfer", "others have no seed of a request; it must be pytorch"),
        ("+sglang.speculative_algorithm=EAGLE", "tokens are checked in batches of other shapes; it must be left out"),
        ("+sglang.moe_a2a_backend=deepep", "tokens arrive in an order of their own; it must be none"),
        ("+sglang.enable_torch_symm_mem=true", "ranks add in NCCL's tree; it must be False"),
        ("+sglang.disable_custom_all_reduce=false", "ranks add in NCCL's tree; it must be True"),
        ("+sglang.enable_deterministic_inference=false", "it is the mode; it must be True"),
        ("+sglang.rl_on_policy_target=fsdp", "it follows another trainer's arithmetic; it must be left out"),
    ],
)
def test_what_the_modes_of_the_libraries_do_not_cover_is_refused(override: str, message: str) -> None:
    found = problems(override)
    assert any(message in text for text in found), found
    assert all("\n" not in text for text in found)
    assert not any(message in text for text in problems())


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt_oss", "of attention sinks, as this gpt_oss model has, Transformer Engine has none"),
        ("qwen3_next", "of gated delta nets, as this qwen3_next model has, Megatron has none for packed"),
        ("gemma3_text", None),
        ("deepseek_v3", None),
    ],
)
def test_layers_without_deterministic_kernels_are_refused(
    family: str, message: str | None, checkpoints: Callable[..., Path]
) -> None:
    model = read_config(str(checkpoints(family, tied=family == "gemma3_text")))
    found = checks.failures(model_checks(EngineConfig(path="x", dtype="bfloat16"), ParallelConfig(), model, BY_LIBRARY))
    assert found == [] if message is None else any(message in text for text in found), found


@pytest.mark.parametrize(
    ("gpu", "te", "capability", "flash", "message"),
    [
        (False, False, None, False, "is planned for GPUs .*and this machine has none; set cluster.gpus_per_node=0"),
        (
            True,
            True,
            (8, 0),
            False,
            "needs a GPU of compute capability 9.0, or the package flash_attn, and this",
        ),
        (True, True, (8, 0), True, None),
        (True, True, (9, 0), False, None),
        (True, False, (8, 0), False, None),
    ],
)
def test_the_machine_must_have_a_deterministic_attention(
    gpu: bool,
    te: bool,
    capability: tuple[int, int] | None,
    flash: bool,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {
        "takes_gpu_options": gpu,
        "has_transformer_engine": te,
        "compute_capability": capability,
        "has_flash_attention": flash,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(platform, name, lambda answer=answer: answer)
    listed = device_checks(EngineConfig(dtype="bfloat16"), ParallelConfig(), BY_LIBRARY)
    if message is None:
        run_all(listed)
    else:
        with pytest.raises(UserError, match=message):
            run_all(listed)
    run_all(knob_checks(EngineConfig(dtype="bfloat16"), ParallelConfig(), BY_LIBRARY))


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("NCCL_ALGO", "Tree", False),
        ("NCCL_ALGO", "Ring,Tree", False),
        ("NCCL_ALGO", "CollnetDirect,Ring", True),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", True),
    ],
)
def test_variables_against_the_mode_are_refused(name: str, value: str, accepted: bool) -> None:
    if accepted:
        determinism.check_variables({name: value})
        return
    with pytest.raises(UserError, match=f"{name}={value} does not repeat bits, as deterministic=true requires on GPUs"):
        determinism.check_variables({name: value})


PROCESS = """
import json, os, sys, torch
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model.build import transformer_config
from megarl.parallel import determinism, groups, platform
from megarl.parallel.config import ParallelConfig
platform.takes_gpu_options = lambda: True
platform.has_transformer_engine = lambda: False
for form in (determinism.OFF, determinism.BY_LIBRARY):
    engine = MegatronEngine(EngineConfig(path=sys.argv[1], dtype="bfloat16"), deterministic=form)
    variables = {name: os.environ.get(name) for name in determinism.VARIABLES}
    joined = groups.initialize(ParallelConfig())
    config = transformer_config(engine.hf_config, joined, torch.bfloat16, engine.backend)
    is_on = torch.are_deterministic_algorithms_enabled()
    told = {"variables": variables, "torch": is_on, "megatron": config.deterministic_mode}
    print(json.dumps(told | {"backend": engine.backend.name}))
"""


def test_a_rank_on_gpus_takes_the_modes_of_its_libraries() -> None:
    """In a process of its own, which keeps them until it ends. NCCL_ALGO is the user's own, and stays."""
    mine = {**os.environ, "PYTHONPATH": str(ROOT), "NCCL_ALGO": "^NVLS"}
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        mine.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-c", PROCESS, str(TINY)]
    done = subprocess.run(command, env=mine, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert told == [
        {
            "variables": {
                "NCCL_ALGO": "^NVLS",
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0" if is_on else None,
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8" if is_on else None,
            },
            "torch": is_on,
            "megatron": is_on,
            "backend": "torch",
        }
        for is_on in (False, True)
    ]
