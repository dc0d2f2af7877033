"""Follows docs/extending_kernels.md in a copy of the sources: it must build, and its own test must pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ninja
import pybind11
import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(cpp|python append|python|diff) (\S+)\n(.*?)^```$", re.M | re.S)


def run(command: list[str], **options: object) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


def apply(kind: str, target: Path, body: str) -> None:
    """Writes a new file, appends to a file, or inserts a diff's added lines after the line before them."""
    if kind == "diff":
        text = target.read_text()
        for anchor, added in re.findall(r"^ (.*)\n\+(.*)$", body, re.M):
            assert text.count(f"{anchor}\n") == 1, f"{target} must have exactly one line {anchor!r}"
            text = text.replace(f"{anchor}\n", f"{anchor}\n{added}\n")
        target.write_text(text)
    elif kind == "python append":
        target.write_text(target.read_text() + "\n\n" + body)
    else:
        assert not target.exists(), f"the guide creates {target}, which exists already"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(body)


pytestmark = pytest.mark.long  # two builds of the kernels


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the kernels and adds the guide's files."""
    copy = tmp_path_factory.mktemp("guide")
    for folder in ("csrc", "megarl/ops", "benchmarks", "tests/simt"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (
        "CMakeLists.txt",
        "megarl/__init__.py",
        "megarl/types.py",
        "megarl/knobs.py",
        "tests/kernels/oracle.py",
        "tests/gpu/conftest.py",
    ):
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    steps = FENCE.findall((ROOT / "docs/extending_kernels.md").read_text())
    assert len(steps) >= 9
    for kind, name, body in steps:
        apply(kind, copy / name, body)
    return copy


def test_the_guide_builds_and_its_test_and_benchmark_run(copy: Path) -> None:
    build = copy / "build"
    configure = [
        *(sys.executable, "-m", "cmake", "-S", str(copy), "-B", str(build), "-G", "Ninja"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"),
        *("-DCMAKE_BUILD_TYPE=None", "-DMEGARL_ISA_COPIES=OFF"),  # not optimised, for a faster build
        f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
    ]
    run(configure)
    run([sys.executable, "-m", "cmake", "--build", str(build)])
    module = next(build.glob("_C.*.so"))
    shutil.copy(module, copy / "megarl" / module.name)
    environment = {**os.environ, "PYTHONPATH": str(copy), "MEGARL_SIMT_CACHE": str(ROOT / "build/simt")}
    run([sys.executable, "-m", "pytest", "-q", "tests/kernels/test_overlong.py"], cwd=copy, env=environment)
    on_emulator = ["tests/gpu/test_overlong_on_device.py", "-k", "emulated"]
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *on_emulator], cwd=copy, env=environment)
    run([sys.executable, "benchmarks/overlong.py"], cwd=copy, env=environment)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed: the CUDA side cannot be compiled here")
def test_the_cuda_side_of_the_guide_compiles(copy: Path) -> None:
    source = copy / "csrc/overlong/cuda.cu"
    run(["nvcc", "-std=c++17", "-arch=sm_90a", "-c", str(source), "-o", str(copy / "overlong.o")])
