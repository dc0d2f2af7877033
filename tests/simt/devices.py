"""Devices that the cases of tests/gpu run on: a real GPU, and the emulator of tests/simt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from oracle import Guarded
from torch import Tensor

Results = tuple[Tensor, ...]


def as_tuple(results: Tensor | Results) -> Results:
    return results if isinstance(results, tuple) else (results,)


class CudaDevice:
    """The CUDA device that torch uses, with the compiled kernels."""

    def run(self, function: Callable[..., Tensor | Results], *arguments: Any, **keys: Any) -> Results:
        """Calls `function` with the tensors among its arguments on the device. Returns results on the CPU."""
        there = [a.cuda() if isinstance(a, Tensor) else a for a in arguments]
        keys = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in keys.items()}
        return tuple(t.cpu() for t in as_tuple(function(*there, **keys)))


@dataclass(frozen=True)
class Schedule:
    """Order in which threads, warps and blocks run, and the byte that fills shared memory before each block."""

    order: int  # simt::Order
    seed: int
    poison: int


NAN, FINITE = 0xFF, 0x42  # as floats NaN and 48.6; as doubles NaN and 1.6e11
SCHEDULES = (Schedule(0, 0, NAN), Schedule(1, 0, FINITE), Schedule(2, 7, NAN))


class EmulatedDevice:
    """The CUDA kernels on the CPU: tensors stay there, and megarl.ops calls the emulated entry points.

    Each call runs under several schedules, and their results must be equal bit for bit. A result that depends on the
    order of threads or on unwritten shared memory differs. Inputs lie between NaN guards; unwritten outputs are NaN.

    It does not cover timing, memory that only the GPU can reach, and races within one stretch between two barriers.
    """

    def __init__(self, module: ModuleType, schedules: tuple[Schedule, ...] = SCHEDULES):
        self.module, self.schedules = module, schedules

    def run(self, function: Callable[..., Tensor | Results], *arguments: Any, **keys: Any) -> Results:
        """Calls `function` on guarded copies of its arguments, once a schedule, and compares the results."""
        first: Results | None = None
        for schedule in self.schedules:
            guards: list[Guarded] = []
            copies = [guarded(a, guards) for a in arguments]
            key_copies = {k: guarded(v, guards) for k, v in keys.items()}
            self.module.simt_configure(schedule.order, schedule.seed, schedule.poison)
            self.module.simt_take_launches()
            with self._entered():
                results = as_tuple(function(*copies, **key_copies))
            assert self.module.simt_take_launches(), "no CUDA kernel was launched"
            for guard in guards:
                guard.check()
            first = first or results
            for one, other in zip(first, results, strict=True):
                assert torch.equal(bits(one), bits(other)), f"the result depends on the order of threads: {schedule}"
        assert first is not None
        return first

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Has megarl.ops use the emulated kernels, and torch fill new tensors with NaN."""
        modules = [m for name, m in sys.modules.items() if name.startswith("megarl.ops.") and hasattr(m, "_C")]
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            with ExitStack() as patches:
                here = mock.Mock(return_value=self.module.Where(True, 0, 0))
                for module in modules:
                    patches.enter_context(mock.patch.multiple(module, _C=self.module, where=here))
                yield
        finally:
            torch.use_deterministic_algorithms(before)


Device = CudaDevice | EmulatedDevice


def guarded(value: Any, guards: list[Guarded]) -> Any:
    """Copies a contiguous tensor into a buffer of its exact size; other values stay."""
    if not isinstance(value, Tensor):
        return value
    assert value.is_contiguous()
    guard = Guarded(tuple(value.shape), value.dtype, guard=NAN)
    guards.append(guard)
    return guard.tensor.copy_(value)


def bits(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor: equal NaN are equal there."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def close(
    device: Device, function: Callable[..., Tensor | Results], *arguments: Any, rtol: float = 1e-5, atol: float = 1e-6,
    **keys: Any,
) -> None:  # fmt: skip
    """Compares the results of the device and the CPU kernels."""
    on_cpu = as_tuple(function(*(a.clone() if isinstance(a, Tensor) else a for a in arguments), **keys))
    for want, got in zip(on_cpu, device.run(function, *arguments, **keys), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
