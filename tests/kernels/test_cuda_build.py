"""The CUDA kernels compile for the shipped architectures, without register spills in the compiler's report."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rows

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from kernel_roofline import ARCHITECTURES, GPUS, SOURCES, Kernel, RowBlocks, compiled  # noqa: E402

pytestmark = rows.marks()
ROW_KERNELS = ("stats_kernel", "backward_kernel")
BUILT = [*ARCHITECTURES] if rows.wants_all() else ["sm_90a"]
THREADS_PER_SM = 1024  # of the row kernels, in blocks of 512 or 128


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """The report of ptxas on every kernel."""
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed: the CUDA kernels cannot be compiled here")
    return compiled(tmp_path_factory.mktemp("cuda"), BUILT)


def test_every_kernel_is_built_for_every_architecture(reports):
    declared = sum(len(re.findall(r"^__global__", s.read_text(), re.M)) for s in SOURCES)
    for architecture in BUILT:
        assert len({kernel.name for kernel in reports if kernel.architecture == architecture}) >= declared


def test_no_kernel_spills_or_uses_local_memory(reports):
    for kernel in reports:
        assert kernel.spill_bytes == kernel.stack_bytes == 0, kernel


def test_row_kernels_fill_half_of_an_sm(reports):
    row_kernels = [kernel for kernel in reports if any(name in kernel.name for name in ROW_KERNELS)]
    assert {kernel.threads for kernel in row_kernels} == {128, 512}
    for kernel in row_kernels:
        assert kernel.blocks_per_sm * kernel.threads >= THREADS_PER_SM, kernel


@pytest.mark.parametrize("name", GPUS)
def test_rows_of_short_vocabularies_hide_more_latency_in_small_blocks(name):
    """More than 1: an SM's blocks read as fast as the memory. Blocks of 512 threads leave a B200 idle."""
    slack = {}
    for threads in (512, 128):
        row = RowBlocks(2 * 32000, threads, THREADS_PER_SM // threads, GPUS[name][0])
        slack[threads] = row.may_take / row.needs
    assert slack[128] > max(1, 1.6 * slack[512])


def test_the_script_prints_its_tables_without_a_gpu_and_without_nvcc(tmp_path):
    figures = tmp_path / "figures.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks/kernel_roofline.py"), "--no-build", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.count("| H100 |") == 2 * 2 + 2 + 1
    streams = 7
    assert len(figures.read_text().splitlines()) == 2 * 4 * 2 + 4 * streams + 2 * 4 * 2
    refused = subprocess.run([*command, "--tokens", "0"], capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "must be at least 1" in refused.stderr
