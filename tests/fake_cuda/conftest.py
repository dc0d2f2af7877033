"""The device of this folder's tests, compiled once, and the process that runs their cases on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import build
from run_cases import DeviceProcess


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device's library."""
    if torch.version.cuda is not None:
        pytest.skip(f"torch {torch.__version__} has a CUDA of its own; this device is for torch's CPU build")
    return build(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="session")
def process(device: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProcess]:
    process = DeviceProcess(device, tmp_path_factory.mktemp("cases"), Path(__file__).parents[2])
    yield process
    process.close()
