"""Runs every case on the emulator, and on a CUDA device where there is one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from megarl.ops.native import HAS_CUDA

# The oracle and the guarded buffers; the emulator.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("kernels", "simt")]

from devices import CudaDevice, Device, EmulatedDevice  # noqa: E402
from simt_build import built, loaded  # noqa: E402

SANITIZE = "MEGARL_SIMT_SANITIZE" in os.environ  # with AddressSanitizer, whose runtime must be loaded already


@pytest.fixture(scope="session")
def cuda() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible to torch")
    if not HAS_CUDA:
        pytest.skip("megarl was built without CUDA: build with MEGARL_CUDA=1")
    return CudaDevice()


@pytest.fixture(scope="session")
def emulated() -> EmulatedDevice:
    return EmulatedDevice(loaded(built(sanitize=SANITIZE)))


@pytest.fixture(params=["cuda", "emulated"])
def device(request: pytest.FixtureRequest) -> Device:
    """Each place where CUDA kernels run. A case gives the same results on all of them."""
    torch.manual_seed(0)
    return request.getfixturevalue(request.param)
