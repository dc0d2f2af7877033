"""The row kernels of the instruction sets that this machine would not choose."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = "test_decode or test_layer or test_attention or float64 or bits or infinity or nan or oracle and (7 or 4097)"


def pytest_under(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "MEGARL_CPU_ISA": isa}
    return subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has several instruction sets")
@pytest.mark.parametrize(
    "isa", [*(pytest.param(isa, marks=pytest.mark.long) for isa in ("baseline", "avx2")), "avx512"]
)
def test_the_values_are_right_on(isa):
    files = [
        str(HERE / f"test_{name}.py") for name in ("logprob_values", "logprob_bits", "decode", "layer", "attention")
    ]
    result = pytest_under(isa, *files, "-k", CASES)
    if "which this processor or build has not" in result.stdout:
        pytest.skip(f"this processor has no {isa}")
    assert result.returncode == 0, result.stdout[-3000:]


def test_an_unknown_instruction_set_is_named():
    result = pytest_under("mmx", str(HERE / "test_logprob_values.py"), "-k", "public_functions")
    assert result.returncode == 1
    assert "MEGARL_CPU_ISA is 'mmx'" in result.stdout
