"""The current device during a launch, on the emulator's devices.

They share the CPU's memory. As on a GPU, a stream of another device than the current one refuses a launch, and stream 0
is the current device's.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from simt_build import built, loaded

from megarl.ops import advantage, native

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return loaded(built())


@pytest.mark.parametrize("own_stream", [True, False])
def test_a_kernel_runs_on_its_tensors_device_whichever_is_current(monkeypatch, module, own_stream):
    """Mocks torch's streams and the tensors' device: torch has no CUDA tensor without a GPU."""

    def current_stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=module.simt_stream(device.index) if own_stream else 0)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(native, "HAS_CUDA", True)
    monkeypatch.setattr(native, "_C", module)
    monkeypatch.setattr(advantage, "_C", module)
    on_second = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(advantage, "where", lambda _: native.where(on_second))
    module.simt_take_launches()
    moments = advantage.moments(torch.tensor([1.0, 2.0, 6.0]), torch.ones(3, dtype=torch.bool))
    assert moments.tolist() == [3.0, 3.0, 14.0]
    assert [device for _, device in module.simt_take_launches()] == [1, 1]
    assert module.simt_current_device() == 0


def test_the_device_is_current_again_after_a_kernel_that_fails(module):
    here = module.Where(True, module.simt_stream(2), 0, 1)  # a stream of device 2, said to be of device 1
    with pytest.raises(RuntimeError, match="whiten: invalid resource handle"):
        module.whiten(here, 1, 0, 0, 0, 0.0, False, 1.0, 0)
    assert module.simt_current_device() == 0


def test_a_device_that_does_not_exist_is_named(module):
    with pytest.raises(RuntimeError, match="CUDA device 99: invalid device ordinal"):
        module.whiten(module.Where(True, 0, 0, 99), 0, 0, 0, 0, 0.0, False, 1.0, 0)
    assert module.simt_current_device() == 0
