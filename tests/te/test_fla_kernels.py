"""flash-linear-attention's own kernels, in Triton's interpreter, equal the rule and the convolution in plain torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="pip install fla-core==0.5.2")
def test_kernels_and_a_model_on_them_equal_plain_torch(checkpoints: Callable[..., Path]) -> None:
    """Forward and backward, in float32: two packs of sequences, and Qwen3.5's layers in an engine."""
    folder = checkpoints("qwen3_5_text", tied=True, vocab_size=343)
    worker = subprocess.run(
        [sys.executable, ROOT / "tests/te/fla_worker.py", folder],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert worker.returncode == 0, worker.stderr[-3000:]
    reports = [json.loads(line) for line in worker.stdout.splitlines() if line.startswith('{"case"')]
    print("\n".join(map(str, reports)))
    assert len(reports) == 7
    for report in reports:
        assert 0 < report["outputs"] < 1e-5, report
        assert 0 < report["gradients"] < (1e-4 if report["case"] == "model" else 1e-5), report
    assert reports[-1]["names"] > 20
