"""Quantisation by the CUDA kernels has the bits of the CPU kernels."""

from __future__ import annotations

import pytest
import torch
from devices import Device, as_tuple, bits
from torch import Tensor

from megarl.ops.quantize import FP8, quantize_fp8, quantize_int4, scales_shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "block"), [((256, 384), (128, 128)), ((131, 190), (128, 128)), ((5, 700), (1, 700))])
def test_quantisation_matches_the_cpu_to_the_bit(
    device: Device, shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight[-1, -1], weight[0, 3], weight[0, 4] = torch.nan, 0.0, -0.0
    if shape[0] > 128:
        weight[-1, -1] = 3e-40  # a subnormal number

    def run(weight: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.zeros(weight.shape, dtype=FP8, device=weight.device)
        scales = torch.zeros(scales_shape(tuple(weight.shape), block), device=weight.device)
        quantize_fp8(weight, block, values, scales)
        return values, scales

    for want, got in zip(as_tuple(run(weight)), device.run(run, weight), strict=True):
        assert torch.equal(bits(want), bits(got))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "group"), [((33, 384), 128), ((5, 96), 32), ((1, 256), 256)])
def test_packing_to_4_bits_matches_the_cpu_to_the_bit(
    device: Device, shape: tuple[int, int], group: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    weight[0] = torch.arange(shape[1]) % 16 / 2 - 4  # halves: ties, as the scale is 1
    weight[0, ::group] = 7.5
    if shape[0] > 4:
        weight[1, 3], weight[2, 3], weight[3] = torch.nan, torch.inf, 0.0
        weight[4, :4] = torch.tensor([3e-40, -0.0, 1e-38, 2e38])

    def run(weight: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(shape[0], shape[1] // 8, dtype=torch.int32, device=weight.device)
        scales = torch.zeros(shape[0], shape[1] // group, dtype=torch.bfloat16, device=weight.device)
        quantize_int4(weight, group, codes, scales)
        return codes, scales

    for want, got in zip(as_tuple(run(weight)), device.run(run, weight), strict=True):
        assert torch.equal(bits(want), bits(got))
