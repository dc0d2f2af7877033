"""Weights as 8-bit floats with a float32 scale for each block, as SGLang serves block FP8 checkpoints.

The arithmetic is that of `per_block_cast_to_fp8` of DeepGEMM, of which SGLang 0.5.23 has a copy, with scales that are
not rounded to powers of two. `quantize_fp8` is one kernel on CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.families.weight_formats import WHOLE, ServedFormat
from megarl.ops.native import _C, DTYPE_CODES, address, check, where

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
LEAST = 1e-4  # below it, a block's largest weight counts as this much


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks of a matrix along its rows and columns."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def scale_of(largest: Tensor) -> Tensor:
    """Scales of blocks whose largest magnitudes are `largest`, float32."""
    return largest.clamp(min=LEAST) / LARGEST


def quantize_fp8(weight: Tensor, block: tuple[int, int], values: Tensor, scales: Tensor, given: bool = False) -> None:
    """Writes a matrix as `values * scales`, in blocks of `block` rows and columns, by one kernel.

    `weight` is float32 or bfloat16 `[rows, columns]`, its rows contiguous. `values` is `FP8` of the same shape,
    contiguous; `scales` float32, one a block. A block's scale is `max(largest |weight|, LEAST) / 448`, and its values
    are `weight * (1 / scale)`, to nearest even. A NaN makes its block NaN. With `given`, `scales` are read instead.

    Raises:
        ValueError: a dtype, shape or device does not fit.
    """
    if weight.dim() != 2 or min(block) < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and blocks of {block}; it must be a matrix")
    shape, device = (weight.shape[0], weight.shape[1]), weight.device
    check("weight", weight, dtype=(torch.float32, torch.bfloat16), shape=shape, device=device, contiguous=False)
    check("values", values, dtype=FP8, shape=shape, device=device)
    check("scales", scales, dtype=torch.float32, shape=scales_shape(shape, block), device=device)
    if not weight.numel():
        return
    if weight.stride(1) != 1 and shape[1] > 1:
        raise ValueError(f"weight has strides {weight.stride()}, its rows must be contiguous; call .contiguous() first")
    _C.quantize_fp8(
        where(weight),
        address(weight),
        DTYPE_CODES[weight.dtype],
        *shape,
        weight.stride(0),
        *block,
        LEAST,
        given,
        address(values),
        address(scales),
    )


def new_pieces(weight: Tensor, format: ServedFormat) -> list[Tensor]:
    """New memory for the format's pieces of a weight."""
    return [
        torch.empty(piece.shape(*weight.shape), dtype=getattr(torch, piece.dtype), device=weight.device)
        for piece in format.pieces
    ]


def quantise(weight: Tensor, format: ServedFormat, pieces: Sequence[Tensor], given: bool = False) -> None:
    """Writes the format's pieces of a weight. With `given` its scales are read, and the values follow from them."""
    values, scales = pieces
    rows, columns = format.scales.block
    quantize_fp8(weight, (rows, weight.shape[1] if columns == WHOLE else columns), values, scales, given)


def dequantise(format: ServedFormat, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weight with which a server computes, rounded from float32 to `dtype`."""
    values, scales = pieces
    return widened(values, scales, format.scales.block, dtype)


def widened(values: Tensor, scales: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Computes `values * scales` in float32, with a scale for each `block` rows and columns, and rounds to `dtype`."""
    for dim, size in enumerate(block):
        if size != WHOLE:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return (values.float() * scales).to(dtype)
