"""Servers of a deterministic run on GPUs: SGLang's own resolution of their arguments, with a mocked GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.parallel.determinism import BY_LIBRARY, OFF
from megarl.rollout.servers import batch_invariance, server_config
from megarl.rollout.servers.server_config import SGLangServerConfig, server_arg_options
from megarl.rollout.servers.sglang_server import SGLangServers

ROOT = Path(__file__).parents[2]
OTHER_DEVICES = {"ascend", "intel_xpu"}


@pytest.fixture(scope="module")
def lines(tiny_checkpoint: Callable[..., Path]) -> list[dict[str, Any]]:
    """The worker's lines: the attention backends of the mode, then a line for each case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    checkpoints = [str(tiny_checkpoint(family, tied=False)) for family in ("qwen3", "qwen3_moe", "deepseek_v3")]
    command = [sys.executable, str(ROOT / "tests/sglang/batch_invariance_worker.py"), *checkpoints]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
def test_sglang_resolves_its_batch_invariant_mode(lines: list[dict[str, Any]]) -> None:
    cases = [line for line in lines[1:] if line["deterministic"]]
    assert len(cases) == 3 * 2 * 2
    for case in cases:
        assert case["enable_deterministic_inference"] is True
        assert case["attention_backend"] in batch_invariance.ATTENTION
        assert case["sampling_backend"] == "pytorch"
        assert case["moe_runner_backend"] == "triton"
        assert case["flashinfer_allreduce_fusion_backend"] is None
        assert case["disable_radix_cache"] is (case["attention_backend"] == "flashinfer")
    on = {(case["architecture"], case["attention_backend"]) for case in cases}
    assert ("sm90", "fa3") in on
    assert ("sm100", "flashinfer") in on


@pytest.mark.long
def test_ranks_of_a_server_add_in_one_tree(lines: list[dict[str, Any]]) -> None:
    for case in lines[1:]:
        in_tree = case["deterministic"] and case["tp"] > 1
        assert case["disable_custom_all_reduce"] is in_tree
        assert case["NCCL_ALGO"] == ("allreduce:tree" if in_tree else None)
        assert (case["NCCL_MIN_NCHANNELS"] is not None) is in_tree
        assert case["NCCL_MIN_NCHANNELS"] == case["NCCL_MAX_NCHANNELS"]


@pytest.mark.long
def test_the_attention_backends_are_those_of_sglang(lines: list[dict[str, Any]]) -> None:
    assert {None, *lines[0]["attention"]} - OTHER_DEVICES == set(batch_invariance.ATTENTION)


def test_every_argument_of_the_rules_exists() -> None:
    assert set(batch_invariance.TAKES) <= set(server_arg_options())


def test_a_server_process_gets_the_mode_and_its_variables(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_config, "gpu_count", lambda: 1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    config, checkpoint = SGLangServerConfig(device="cuda", dtype="bfloat16"), tiny_checkpoint("qwen3")
    for form, mode, workspace in ((BY_LIBRARY, True, ":4096:8"), (OFF, None, None)):
        (server,) = SGLangServers(config, checkpoint, tmp_path, deterministic=form).servers
        assert server.args.get("enable_deterministic_inference") is mode
        assert server._environment(str(tmp_path)).get("CUBLAS_WORKSPACE_CONFIG") == workspace
