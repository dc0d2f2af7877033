"""Weights in 8 and 4 bits, in the formats of block FP8 and of compressed-tensors, as SGLang serves them.

`quantize_fp8` and `quantize_int4` are one kernel each on CPU and CUDA. The first has the arithmetic of
`per_block_cast_to_fp8` of DeepGEMM, of which SGLang 0.5.23 has a copy, with scales that are not rounded to powers of
two. The second has that of compressed-tensors' min-max scales for symmetric groups, with scales in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.families.weight_formats import PACKED, WHOLE, ServedFormat
from megarl.ops.native import _C, DTYPE_CODES, address, check, where

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
LEAST = 1e-4  # below it, a block's largest weight counts as this much
INT4_STEPS = 7.5  # half of the 15 steps between -8 and 7
INT4_ZERO = 8  # the code of 0
GROUPS = (32, 64, 128, 256)  # columns that share a scale of 4-bit weights


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
    _check_rows(weight)
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


def quantize_int4(weight: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    """Writes a matrix as `(code - 8) * scale`, with a scale for each `group` columns of a row, by one kernel.

    `weight` is float32 or bfloat16 `[rows, columns]`, its rows contiguous. `codes` is int32 `[rows, columns / 8]`, with
    the first of 8 columns in the lowest 4 bits; `scales` bfloat16 `[rows, columns / group]`. A scale is the group's
    largest magnitude over 7.5, 2^-7 for zeros. A code is `weight / scale` to the nearest, ties to even, held to -8..7.
    A group with a NaN or an infinity has such a scale.

    Raises:
        ValueError: a dtype, shape or device does not fit.
    """
    if weight.dim() != 2 or group not in GROUPS or weight.shape[1] % group:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and groups of {group}; it must be a matrix, its columns a "
            f"multiple of {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]}"
        )
    rows, columns, device = weight.shape[0], weight.shape[1], weight.device
    check(
        "weight", weight, dtype=(torch.float32, torch.bfloat16), shape=(rows, columns), device=device, contiguous=False
    )
    check("codes", codes, dtype=torch.int32, shape=(rows, columns // PACKED), device=device)
    check("scales", scales, dtype=torch.bfloat16, shape=(rows, columns // group), device=device)
    if not weight.numel():
        return
    _check_rows(weight)
    _C.quantize_int4(
        where(weight),
        address(weight),
        DTYPE_CODES[weight.dtype],
        rows,
        columns,
        weight.stride(0),
        group,
        address(codes),
        address(scales),
    )


def _check_rows(weight: Tensor) -> None:
    """Refuses a matrix whose rows are not contiguous."""
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        raise ValueError(f"weight has strides {weight.stride()}, its rows must be contiguous; call .contiguous() first")


def codes_of(words: Tensor) -> Tensor:
    """Unpacks the 4-bit codes of an int32 tensor `[..., words]`, as uint8 `[..., words * 8]`."""
    pairs = words.contiguous().view(torch.uint8)  # little-endian: the lowest bits come first
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)


def unpacked(words: Tensor) -> Tensor:
    """Unpacks 4-bit numbers of -8..7 from int32 `[rows, columns / 8]`, as int8 `[rows, columns]`."""
    return codes_of(words).to(torch.int8) - INT4_ZERO


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
    if format.values.dtype == "int32":
        return quantize_int4(weight, columns, values, scales)
    quantize_fp8(weight, (rows, weight.shape[1] if columns == WHOLE else columns), values, scales, given)


def dequantise(format: ServedFormat, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weight with which a server computes, rounded from float32 to `dtype`."""
    values, scales = pieces
    return widened(unpacked(values) if values.dtype == torch.int32 else values, scales, format.scales.block, dtype)


def widened(values: Tensor, scales: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Computes `values * scales` in float32, with a scale for each `block` rows and columns, and rounds to `dtype`."""
    for dim, size in enumerate(block):
        if size != WHOLE:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return (values.float() * scales).to(dtype)
