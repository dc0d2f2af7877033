"""SGLang's own argument resolution and model classes with a mocked GPU: attention, experts, dtype and weight layout.

gpu_backends_worker.py says what the mock covers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import CONFIGS
from megarl.families import FAMILIES, decoder, read_config
from megarl.rollout.servers.gpu_backends import FLOAT32_ATTENTION, PLAIN_EXPERTS

ROOT = Path(__file__).parents[2]
ARCHITECTURES = {"sm80", "sm90", "sm100", "sm120"}
OTHERS = {family: {"triton"} if known.sglang_windows else set() for family, known in FAMILIES.items()}
OTHERS |= {family: {"triton", "trtllm_mla"} for family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")}
OTHERS |= {family: {"triton"} for family in FAMILIES if family.startswith(("qwen3_next", "qwen3_5"))}  # on sm100
# Some parameters stay float32: routers' biases (in GLM the weight as well), decays of gated delta nets.
PARTLY_FLOAT32 = {"deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite", "qwen3_next"}
BUILT = [family for family in FAMILIES if not family.startswith("qwen3_5")]  # SGLang's class holds a vision tower too
SIXTEEN_BIT = {"fa3", "flashinfer", "trtllm_mha"}  # SGLang's defaults for models with grouped-query attention

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def reports(tiny_checkpoint: Callable[..., Path]) -> list[dict[str, Any]]:
    """The worker's lines: verdicts on models, then the resolutions and the table."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    checkpoints = [str(tiny_checkpoint(family, tied=False)) for family in BUILT]
    command = [sys.executable, str(ROOT / "tests/sglang/gpu_backends_worker.py"), *checkpoints]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def entries(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return reports[-1]["entries"]


@pytest.fixture(scope="module")
def verdicts(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return reports[:-1]


def test_every_recipe_with_servers_and_every_family_is_resolved_on_every_architecture(entries: dict[str, Any]) -> None:
    recipes = {path.stem for path in (CONFIGS / "experiment").glob("*.yaml") if "method: rl" in path.read_text()}
    assert recipes <= set(entries)
    assert {"gsm8k_ppo", "gsm8k_gdpo"} <= set(entries)  # based on another recipe
    assert {entry["family"] for entry in entries.values()} == set(FAMILIES) - {"qwen3_5_text"}  # no size is listed
    assert all(set(entry["on"]) == ARCHITECTURES for entry in entries.values())


def test_attention_takes_the_dtype_of_the_run(entries: dict[str, Any]) -> None:
    for name, entry in entries.items():
        for architecture, value in entry["on"].items():
            accepted = FLOAT32_ATTENTION if value["dtype"] == "float32" else SIXTEEN_BIT | OTHERS[entry["family"]]
            assert value["attention_backend"] in accepted, (name, architecture, value)
            assert value["prefill_attention_backend"] is value["decode_attention_backend"] is None
    assert {entry["on"]["sm90"]["dtype"] for entry in entries.values()} == {"float32", "bfloat16"}


def test_experts_keep_the_layout_of_the_checkpoint(entries: dict[str, Any]) -> None:
    for name, entry in entries.items():
        assert all(value["moe_runner_backend"] in PLAIN_EXPERTS for value in entry["on"].values()), name


def test_the_receiver_takes_every_family_as_sglang_builds_it(verdicts: list[dict[str, Any]]) -> None:
    built = [verdict for verdict in verdicts if verdict["ours"]]
    assert {verdict["family"] for verdict in built} == set(BUILT)
    for verdict in built:
        assert verdict.get("fragments", 0) > 20, verdict
        sinks = verdict["family"] == "gpt_oss"  # and biases of experts
        own = {"torch.bfloat16", "torch.float32"} if sinks else set()
        own |= {"torch.float32"} if verdict["family"] in PARTLY_FLOAT32 else set()
        assert set(verdict["dtypes"]) == {"torch." + verdict["dtype"]} | own
    on = {verdict["architecture"] for verdict in built if verdict["family"] == "qwen3_moe"}
    assert on == ARCHITECTURES


def test_every_router_records_its_experts_on_every_architecture(
    verdicts: list[dict[str, Any]], tiny_checkpoint: Callable[..., Path]
) -> None:
    """Of the formats of a router's output, `STANDARD` alone passes SGLang's capturer (topk.py:916)."""
    for verdict in [v for v in verdicts if v["ours"] and FAMILIES[v["family"]].experts]:
        model = decoder(read_config(str(tiny_checkpoint(verdict["family"], tied=False))))
        assert model.experts is not None
        sparse = [index for index, is_sparse in enumerate(model.sparse) if is_sparse]
        assert verdict["routers"] == [[index, model.experts.topk, "STANDARD"] for index in sparse], verdict


def test_the_receiver_refuses_what_sglang_would_choose_for_experts_on_sm100(verdicts: list[dict[str, Any]]) -> None:
    (verdict,) = [v for v in verdicts if not v["ours"] and v["family"] == "qwen3_moe" and v["dtype"] == "bfloat16"]
    assert "experts in blocks; use --moe-runner-backend triton" in verdict["refused"]


def test_float32_layers_run_as_torch_code_and_not_on_16_bit_kernels(verdicts: list[dict[str, Any]]) -> None:
    norms = {v["ours"]: v["norm"] for v in verdicts if v["dtype"] == "float32" and v["family"] == "llama"}
    assert norms == {True: "float32", False: "sgl_kernel.rmsnorm"}


def test_the_page_has_what_resolution_gives(reports: list[dict[str, Any]]) -> None:
    page = (ROOT / "docs" / "install_gpu.md").read_text()
    assert reports[-1]["table"] in page, "run: python docs/make_gpu_backends.py"
