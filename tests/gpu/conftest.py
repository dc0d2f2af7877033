"""Skips these tests, with the reason, without a CUDA device or a build with the CUDA kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megarl.ops.native import HAS_CUDA

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))  # the oracle and the guarded buffers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA device is visible to torch"
    elif not HAS_CUDA:
        reason = "megarl was built without CUDA: build with MEGARL_CUDA=1"
    if reason:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
