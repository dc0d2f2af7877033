"""What SGLang's import on a CPU stands on, whatever build of torch is installed."""

from __future__ import annotations

import subprocess
import sys

# Planted: the mark of a build for CUDA, as PyPI's torch bears it.
MARKED_FOR_CUDA = """
import torch
torch.version.cuda = "13.0"
from megarl.cpu import sglang_launch
sglang_launch.install()
from sglang.srt.distributed.device_communicators.pynccl_wrapper import find_nccl_library
try:
    print(find_nccl_library())
except ValueError as error:
    print(error)
"""


def test_a_torch_built_for_cuda_does_not_make_servers_on_a_cpu_start_nccl() -> None:
    """Covers the mark alone; a run of the suite with PyPI's torch covers the library beside it."""
    done = subprocess.run([sys.executable, "-c", MARKED_FOR_CUDA], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("NCCL only supports CUDA"), done.stdout
