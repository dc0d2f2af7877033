"""Transformer Engine itself builds the models, and has the signatures that the stand-in takes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).parent / "transformer_engine.json"
GPU_ENV = Path(os.environ.get("MEGARL_GPU_ENV", ROOT / "build" / "gpu-env"))


@pytest.fixture(scope="module")
def recorded_now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = GPU_ENV / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{GPU_ENV} has no GPU environment: run `make gpu-env`, or name another in MEGARL_GPU_ENV")
    file = tmp_path_factory.mktemp("te") / "record.json"
    run = subprocess.run(
        [str(python), "-W", "ignore", "-m", "tests.te.record", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    facts: dict[str, Any] = json.loads(file.read_text())
    return facts


@pytest.mark.parametrize("part", ["versions", "signatures", "models"])
def test_the_record_is_what_transformer_engine_says(part: str, recorded_now: dict[str, Any]) -> None:
    """New version: build/gpu-env/bin/python -m tests.te.record tests/te/transformer_engine.json; read the diff."""
    assert recorded_now[part] == json.loads(RECORD.read_text())[part]
