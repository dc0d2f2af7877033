"""The emulated kernels under AddressSanitizer: no read or write outside of a buffer, shared variable or local array."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from simt_build import ROOT, Kernels, built, linked, lock

PROBE = "csrc/probe/cuda.cu"
# The chunked head launches the same kernels many times; longer rows take the same paths as 4,097 columns.
CASES = "emulated and not head and not same_bits and not 32000 and not 50257 and not 50260 and not 151936"
READ_PAST_THE_END = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.probe.restype = ctypes.c_char_p
print(library.probe(b"past_the_end", 0, 0, 255, (ctypes.c_int * int(sys.argv[2]))()).decode())
"""


def under_sanitizer(reports: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Starts Python with the sanitizer's runtime, which must be loaded before the interpreter."""
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={reports / 'asan'}",
        "PYTHONMALLOC": "malloc",
        "PYTEST_ADDOPTS": "",  # the number of tests is read from pytest's output
        "MEGARL_SIMT_SANITIZE": "1",
    }
    command = [sys.executable, *arguments]
    if int(Path("/proc/sys/vm/mmap_rnd_bits").read_text()) > 28:  # Python may lie where the sanitizer's heap begins
        command = ["setarch", "--addr-no-randomize", *command]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)


def reported(reports: Path) -> str:
    return "\n".join(path.read_text() for path in reports.glob("asan.*"))


@pytest.mark.long
def test_no_kernel_leaves_its_memory(tmp_path: Path) -> None:
    built(sanitize=True)
    select = ("tests/gpu", "-k", CASES, "-m", "not long")
    result = under_sanitizer(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *select)
    assert reported(tmp_path) == ""
    assert result.returncode == 0, result.stdout[-4000:]
    (passed,) = re.findall(r"^(\d+) passed", result.stdout, re.M)
    assert int(passed) > 90


@pytest.mark.parametrize(("elements", "fault"), [(32, True), (33, False)])
def test_a_read_of_one_element_past_the_end_is_reported(tmp_path: Path, elements: int, fault: bool) -> None:
    text = (Path(__file__).parent / "probe.cu").read_text()
    kernels = Kernels(ROOT / "csrc", {PROBE: text}, sanitize=True)
    with lock():
        library = linked([kernels.object_of(PROBE), kernels.object_of("simt.cpp")], sanitize=True)
    result = under_sanitizer(tmp_path, "-c", READ_PAST_THE_END, str(library), str(elements))
    assert (result.returncode != 0) == fault
    assert ("heap-buffer-overflow" in reported(tmp_path)) == fault
    assert ("past_the_end" in reported(tmp_path)) == fault
