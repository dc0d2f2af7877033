"""The CUDA kernels compile for every shipped architecture, without register spills in the compiler's report."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc").glob("*/cuda.cu"))
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
MAX_REGISTERS = {"stats_kernel": 64, "backward_kernel": 64}  # so that two blocks of 512 threads fit on an SM


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Compiles the kernels; `reports[kernel, architecture]` is the report of ptxas."""
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed: the CUDA kernels cannot be compiled here")
    out = tmp_path_factory.mktemp("cuda")
    targets = [f"-gencode=arch={a.replace('sm', 'compute')},code={a}" for a in ARCHITECTURES]
    running = [
        subprocess.Popen(
            ["nvcc", "-std=c++17", "-O3", "-Xptxas=-v", *targets, "-c", str(s), "-o", str(out / f"{i}.o")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, s in enumerate(SOURCES)
    ]
    report_by_kernel = {}
    for process in running:
        log = process.communicate(timeout=280)[1]
        assert process.returncode == 0, log
        for block in log.split("Compiling entry function '")[1:]:
            name, architecture = re.match(r"(\w+)' for '(\w+)'", block).groups()
            report_by_kernel[name, architecture] = block
    return report_by_kernel


def test_every_kernel_is_built_for_every_architecture(reports):
    declared = sum(len(re.findall(r"^__global__", s.read_text(), re.M)) for s in SOURCES)
    for architecture in ARCHITECTURES:
        names = {name for name, a in reports if a == architecture}
        assert len(names) >= declared


def test_no_kernel_spills_or_uses_local_memory(reports):
    for (name, architecture), report in reports.items():
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, (name, architecture, report)
        assert " lmem" not in report, (name, architecture, report)


def test_row_kernels_leave_room_for_two_blocks(reports):
    for (name, architecture), report in reports.items():
        for kernel, limit in MAX_REGISTERS.items():
            if kernel in name:
                assert int(re.search(r"Used (\d+) registers", report)[1]) <= limit, (name, architecture)
