"""The row kernels of the instruction sets that this machine would not choose."""

from __future__ import annotations

import os
import platform
import re
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
@pytest.mark.long
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_the_values_are_right_on(isa):
    files = [
        str(HERE / f"test_{name}.py") for name in ("logprob_values", "logprob_bits", "decode", "layer", "attention")
    ]
    result = pytest_under(isa, *files, "-k", CASES)
    if "which this processor or build has not" in result.stdout:
        pytest.skip(f"this processor has no {isa}")
    assert result.returncode == 0, result.stdout[-3000:]


def test_an_unknown_instruction_set_is_named():
    """By the first call of each kind of kernel, also of those that are chosen beside a parallel loop."""
    names = ("logprob_values", "decode", "layer", "attention")
    files = [str(HERE / f"test_{name}.py") for name in names]
    some = "public_functions or norm_adds_the_update or norm_and_its_gradients or sees_no_other"
    result = pytest_under("mmx", *files, "-k", some)
    assert result.returncode == 1, result.stderr[-3000:]
    failed = re.findall(r"^FAILED .*test_(\w+)\.py::", result.stdout, re.M)
    assert set(failed) == set(names)
    assert len(re.findall(r"^E +RuntimeError: MEGARL_CPU_ISA is 'mmx'", result.stdout, re.M)) >= len(failed)
