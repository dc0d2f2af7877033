"""Transformer Engine itself builds the models, and has the signatures that the stand-in takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).parent / "transformer_engine.json"
TE_MODULES = Path(os.environ.get("MEGARL_TE_MODULES", ROOT / "build" / "te-modules"))
GPU_ENV = Path(os.environ.get("MEGARL_GPU_ENV", ROOT / "build" / "gpu-env"))


def python_of_gpu_env() -> Path:
    python = GPU_ENV / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{GPU_ENV} has no GPU environment: run `make gpu-env`, or name another in MEGARL_GPU_ENV")
    return python


def in_gpu_env(*arguments: str, **variables: str) -> str:
    """Runs the GPU environment's Python. Returns what it prints."""
    done = subprocess.run(
        [str(python_of_gpu_env()), "-W", "ignore", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def recorded_now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("te") / "record.json"
    in_gpu_env("-m", "tests.te.record", str(file))
    facts: dict[str, Any] = json.loads(file.read_text())
    return facts


@pytest.mark.parametrize("part", ["versions", "signatures", "models"])
def test_the_record_is_what_transformer_engine_says(part: str, recorded_now: dict[str, Any]) -> None:
    """New version: build/gpu-env/bin/python -m tests.te.record tests/te/transformer_engine.json; read the diff."""
    assert recorded_now[part] == json.loads(RECORD.read_text())[part]


def test_the_packages_python_modules_say_what_the_record_has(tmp_path: Path) -> None:
    if not (TE_MODULES / "transformer_engine").exists():
        pytest.skip(f"{TE_MODULES} has no Transformer Engine: tests/te/python_modules.py says how to get it")
    file = tmp_path / "record.json"
    shutil.copy(RECORD, file)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.te.record", str(file), "--without-extension"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TE_MODULES), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert file.read_text() == RECORD.read_text()


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(in_gpu_env("-m", "tests.te.fp8_checks").splitlines()[-1])
    return facts


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_fp8_runs_where_transformer_engine_says(name: str, verdicts: dict[str, Any]) -> None:
    gpus = verdicts[name]["gpus"]
    assert {theirs for theirs, _ in gpus.values()} == {True, False}
    for gpu, (theirs, megarls) in gpus.items():
        assert theirs == megarls, gpu
    assert verdicts[name]["multiples"] == {"whole": True, "half": False}


def test_megatron_builds_the_recipes_of_fp8(verdicts: dict[str, Any]) -> None:
    assert {name: facts["recipe"] for name, facts in verdicts.items()} == {
        "blockwise": {"class": "Float8BlockScaling", "format": "E4M3", "align": 16, "parameters": False},
        "mxfp8": {"class": "MXFP8BlockScaling", "format": "E4M3", "align": 32, "parameters": False},
    }


def test_torch_takes_the_calls_of_attention_over_shared_prompts() -> None:
    """On CUDA tensors without data: the signatures, dtypes and shapes of the environment's torch."""
    in_gpu_env("-m", "tests.te.flash_calls")


def test_one_cudnn_is_loaded_though_the_machine_has_another(tmp_path: Path) -> None:
    """A second copy stands where Transformer Engine looks first, as in images of CUDA."""
    python_of_gpu_env()
    (wheel,) = GPU_ENV.glob("lib/python3.*/site-packages/nvidia/cudnn/lib/libcudnn.so.9")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudnn.so").write_bytes(wheel.read_bytes())
    script = (
        "import megarl, transformer_engine.pytorch\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libcudnn.so' in line})"
    )
    assert in_gpu_env("-c", script, CUDA_HOME=str(tmp_path)).split() == [str(wheel)]
