"""MXFP4 weights, as gpt-oss is published in: 4-bit floats in blocks of 32 with a common power of two.

OCP Microscaling Formats 1.0, section 5.1: an element is E2M1, with a sign, two bits of exponent and one of mantissa. A
scale is E8M0, 8 bits of exponent with a bias of 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # elements that share a scale
SCALE_BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by its three lower bits


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Computes the weights, bfloat16 `[..., blocks * 32]`. Each element times its scale is exact in bfloat16.

    Args:
        blocks: uint8 `[..., blocks, 16]`, two elements a byte, the first in its lower half.
        scales: uint8 `[..., blocks]`.
    """
    values = torch.tensor(MAGNITUDES, device=blocks.device)
    values = torch.cat((values, -values))
    elements = values[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)
    exponents = scales.int() - SCALE_BIAS
    return torch.ldexp(elements, exponents[..., None]).flatten(-2).bfloat16()
