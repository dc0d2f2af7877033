"""Builds the CPU kernels with the address and undefined-behaviour sanitizers and runs their tests on that build.

    python tests/kernels/run_sanitized.py [more pytest arguments]

The sanitized module is in build/sanitize and replaces megarl._C in this process only.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitize"
INSIDE = "MEGARL_SANITIZED_RUN"


def build() -> None:
    import ninja
    import pybind11

    configure = [
        *(sys.executable, "-m", "cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja"),
        *("-DMEGARL_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}"),
        *(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}"),
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "cmake", "--build", str(BUILD)], check=True)


def run_again_under_the_sanitizers() -> int:
    """Runs this script again with the sanitizers' runtime preloaded; it must be loaded before the interpreter."""
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    environment = {
        **os.environ,
        INSIDE: "1",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={BUILD}/report",
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:log_path={BUILD}/report",
        "PYTHONMALLOC": "malloc",
    }
    for old in BUILD.glob("report.*"):
        old.unlink()
    code = subprocess.run([sys.executable, *sys.argv], env=environment, cwd=ROOT).returncode
    for report in BUILD.glob("report.*"):
        print(report.read_text()[:4000])
    return code


def use_sanitized_module() -> None:
    spec = importlib.util.spec_from_file_location("megarl._C", next(BUILD.glob("_C.*.so")))
    assert spec is not None
    assert spec.loader is not None
    import torch  # noqa: F401  (loads its OpenMP runtime first)

    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["megarl._C"] = module


if __name__ == "__main__":
    if INSIDE not in os.environ:
        build()
        sys.exit(run_again_under_the_sanitizers())
    import pytest

    sys.path.insert(0, str(ROOT))
    use_sanitized_module()
    here = str(Path(__file__).parent)
    # These start other processes, which would not load the sanitized module.
    excluded = ("test_cuda_build.py", "test_groups.py", "test_instruction_sets.py", "test_extending_guide.py")
    skip = [f"--ignore={here}/{name}" for name in excluded]
    sys.exit(pytest.main([here, "-q", "-p", "no:cacheprovider", *skip, *sys.argv[1:]]))
