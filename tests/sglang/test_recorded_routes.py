"""SGLang's routers and its capturer of experts, in models that it serves on GPUs alone, give the routes that are read.

A server with experts in other layers than the model's is refused by `served_checks`, and SGLang's classes show why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.families import decoder, load_config
from tests.held_ports import held_port
from tests.sglang.tiny_models import save_multimodal

ROOT = Path(__file__).parents[2]
# Configs whose dense layers SGLang gives experts, or the other way round.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0]},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse", "sparse"]},
}
pytestmark = pytest.mark.long  # SGLang is pinned

SERVED = ("gpt_oss", "qwen3_next", "qwen3_5_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def reports(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("routes")
    (work / "qwen3_5_moe").mkdir()
    save_multimodal(work / "qwen3_5_moe")
    for family in (*SERVED, *OTHERS):
        if not (work / family).exists():
            (work / family).symlink_to(tiny_checkpoint(family, tied=False))
    for family, fields in OTHERS.items():
        shutil.copytree(work / family, work / f"{family}_other")
        config = json.loads((work / family / "config.json").read_text())
        (work / f"{family}_other" / "config.json").write_text(json.dumps(config | fields))
    names = [*SERVED, *(f"{family}_other" for family in OTHERS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    port = held_port()
    command = [sys.executable, str(ROOT / "tests/sglang/routes_worker.py")]
    command += [str(value) for value in (os.getpid(), 0, 1, 1, port, 0)]
    done = subprocess.run(
        [*command, *(str(work / name) for name in names)], env=environment, capture_output=True, text=True, timeout=450
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"checkpoint"')]
    assert [line["checkpoint"] for line in lines] == names
    return {line["checkpoint"]: line | {"folder": work / line["checkpoint"]} for line in lines}


@pytest.mark.parametrize("family", SERVED)
def test_sglang_records_the_experts_that_its_routers_chose(family: str, reports: dict[str, Any]) -> None:
    report = reports[family]
    assert report["routes"] == report["chosen"]  # the second request's prompt from the cache of the first
    assert len(report["routes"][0]) == 6
    assert report["routes"][0] != report["routes"][1]


@pytest.mark.parametrize("family", OTHERS)
def test_sglang_ignores_lists_of_layers_with_experts(family: str, reports: dict[str, Any]) -> None:
    sparse = decoder(load_config(reports[f"{family}_other"]["folder"])).sparse
    assert reports[f"{family}_other"]["recorded"] != [i for i, has in enumerate(sparse) if has]
