"""Quantisation to 8 and 4 bits: the kernels' rounding and scales are those of torch and of compressed-tensors."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from oracle import Guarded
from torch import Tensor

from megarl.families.weight_formats import WHOLE
from megarl.ops import torch_twins
from megarl.ops.quantize import FP8, GROUPS, quantize_fp8, quantize_int4, scale_of, scales_shape, unpacked, widened

SHAPES = ((1, 1), (128, 128), (129, 127), (300, 640), (7, 1000))
BLOCKS = ((128, 128), (1, 4096), (3, 5))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """By the kernel, into guarded buffers."""
    values = Guarded(tuple(weight.shape), FP8)
    scales = Guarded(scales_shape(tuple(weight.shape), block), torch.float32)
    quantize_fp8(weight, block, values.tensor, scales.tensor)
    return values.check(), scales.check()


def by_torch(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    values = torch.empty(tuple(weight.shape), dtype=FP8)
    scales = torch.empty(scales_shape(tuple(weight.shape), block))
    torch_twins.quantize_fp8(weight, block, values, scales)
    return values, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_those_of_plain_torch_to_the_bit(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-12, 3, shape, generator=generator).float().exp2()
    weight = (torch.randn(shape, generator=generator) * exponents).to(dtype)
    weight[0, 0] = -0.0
    for one, other in zip(quantised(weight, block), by_torch(weight, block), strict=True):
        assert torch.equal(bits(one), bits(other))


def test_every_bfloat16_and_what_lies_beside_each_tie_rounds_as_torch_casts() -> None:
    """In blocks of one row that begin with 448, so that the scale is 1 and the values are the numbers."""
    codes = torch.arange(2**16, dtype=torch.int32)
    every = codes.to(torch.int16).view(torch.bfloat16).float()
    small = every[every.abs() <= 448]  # leaves NaN out
    ties = torch.cat([small, small.nextafter(torch.tensor(500.0)), small.nextafter(torch.tensor(-500.0))]).clamp(
        -448, 448
    )
    weight = torch.cat([torch.full((len(ties), 1), 448.0), ties[:, None]], dim=1)
    values, scales = quantised(weight, (1, 2))
    assert torch.equal(scales, torch.ones_like(scales))
    assert torch.equal(bits(values[:, 1:]), bits(ties[:, None].to(FP8)))
    assert len(set(bits(values[:, 1]).tolist())) == 254  # every E4M3 number


def test_a_block_of_zeros_has_the_least_scale_and_one_with_nan_or_infinity_is_nan() -> None:
    weight = torch.zeros(4, 128)
    weight[1, 5], weight[2, 7], weight[3, 9] = torch.nan, -torch.inf, 1e30
    weight[3, 10] = 1.0
    values, scales = quantised(weight, (1, 128))
    assert scales[0, 0] == torch.tensor(1e-4) / 448
    assert not bits(values[0]).any()
    assert bool(scales[1].isnan())
    assert bool(values[1].float().isnan().all())
    assert bool(scales[2].isinf())
    assert bool(values[2, 7].float().isnan())
    assert values[3, 9].float() == 448
    assert values[3, 10].float() == 0


def test_a_part_of_a_wider_matrix_is_read_in_place() -> None:
    whole = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    part = whole[128:, 128:256]
    for one, other in zip(quantised(part, (128, 128)), quantised(part.clone(), (128, 128)), strict=True):
        assert torch.equal(bits(one), bits(other))


def test_what_the_kernel_cannot_take_is_refused() -> None:
    values, scales = torch.empty(4, 6, dtype=FP8), torch.empty(1, 1)
    for weight, error in (
        (torch.zeros(4, 6).half(), "float16"),
        (torch.zeros(4, 6, 1), "must be a matrix"),
        (torch.zeros(6, 4).t(), "rows must be contiguous"),
        (torch.zeros(4, 5), r"values has shape \(4, 6\), expected \(4, 5\)"),
    ):
        with pytest.raises(ValueError, match=error):
            quantize_fp8(weight, (128, 128), values, scales)
    with pytest.raises(ValueError, match=r"scales has shape \(1, 1\), expected \(4, 3\)"):
        quantize_fp8(torch.zeros(4, 6), (1, 2), values, scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_scales_are_read_and_left(dtype: torch.dtype) -> None:
    """Two halves of rows, with the scales of whole rows, are the halves of the whole."""
    weight = torch.randn(33, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    values, scales = quantised(weight, (1, 256))
    for columns in (slice(0, 96), slice(96, 256)):
        part = weight[:, columns]
        own, by_twin = (torch.empty(tuple(part.shape), dtype=FP8) for _ in range(2))
        kept = scale_of(weight.abs().amax(dim=1).float())[:, None]
        assert torch.equal(kept, scales)
        quantize_fp8(part, (1, part.shape[1]), own, kept, given=True)
        torch_twins.quantize_fp8(part, (1, part.shape[1]), by_twin, kept, given=True)
        assert torch.equal(kept, scales)
        assert torch.equal(bits(own), bits(values[:, columns]))
        assert torch.equal(bits(own), bits(by_twin))


def packed(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales by the kernel, into guarded buffers."""
    rows, columns = weight.shape
    codes = Guarded((rows, columns // 8), torch.int32)
    scales = Guarded((rows, columns // group), torch.bfloat16)
    quantize_int4(weight, group, codes.tensor, scales.tensor)
    return codes.check(), scales.check()


def packed_by_torch(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 8, dtype=torch.int32)
    scales = torch.empty(rows, columns // group, dtype=torch.bfloat16)
    torch_twins.quantize_int4(weight, group, codes, scales)
    return codes, scales


def spread_weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random weights whose rows differ in size by up to 2^40, one of them all 0, and quotients that are ties."""
    generator = torch.Generator().manual_seed(rows + columns)
    sizes = torch.randint(-30, 10, (rows, 1), generator=generator).float().exp2()
    weight = torch.randn(rows, columns, generator=generator) * sizes
    weight[0] = 0
    weight[-1] = torch.arange(columns) % 16 / 2 - 4  # halves
    weight[-1, 0] = 7.5  # the scale is 1
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_4_bits_are_those_of_compressed_tensors_to_the_bit(group: int, dtype: torch.dtype) -> None:
    weight = spread_weight(37, 768, dtype)
    codes, scales = packed(weight, group)
    groups = (
        weight.bfloat16().unflatten(1, (-1, group)) if dtype == torch.bfloat16 else weight.unflatten(1, (-1, group))
    )
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    expected, zeros = calculate_qparams(groups.amin(dim=2), groups.amax(dim=2), args)
    expected = expected.bfloat16()
    expected[0] = 2**-7  # float32 weights have a smaller one for zeros
    assert torch.equal(bits(scales), bits(expected))
    numbers = quantize(weight.float(), expected.float(), zeros.float(), args, dtype=torch.int8)
    assert torch.equal(codes, pack_to_int32(numbers, 4))
    assert torch.equal(unpacked(codes), unpack_from_int32(codes, 4, weight.shape))
    assert torch.equal(unpacked(codes), numbers)
    for one, other in zip((codes, scales), packed_by_torch(weight, group), strict=True):
        assert torch.equal(bits(one), bits(other))
    error = (numbers.unflatten(1, (-1, group)) * scales.float()[..., None]).flatten(1) - weight.float()
    steps = scales.float().repeat_interleave(group, 1)
    assert bool((error.abs() <= 0.53 * steps).all()), "half a step, and the rounding of the scale"


def test_groups_with_nan_or_infinity_have_such_a_scale_and_their_neighbours_do_not() -> None:
    weight = torch.ones(3, 256)
    weight[1, 5], weight[2, 200] = torch.nan, -torch.inf
    codes, scales = packed(weight, 128)
    assert scales.isnan().tolist() == [[False, False], [True, False], [False, False]]
    assert scales.isinf().tolist() == [[False, False], [False, False], [False, True]]
    assert not unpacked(codes)[1, :128].any()
    assert not unpacked(codes)[2, 128:].any()
    assert bool((unpacked(codes)[0] == 7).all())
    for one, other in zip((codes, scales), packed_by_torch(weight, 128), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


def test_a_group_whose_scale_is_the_least_number_has_the_outermost_codes() -> None:
    """Such a scale is rounded by up to a half, so quotients reach beyond 8 and -8 and are cut."""
    weight = torch.zeros(1, 128)
    weight[0, :4] = torch.tensor([11.0, -11.0, 8.0, -8.0]) * 2.0**-133  # bfloat16's least number is 2^-133
    codes, scales = packed(weight, 128)
    assert scales.item() == 2.0**-133
    assert unpacked(codes)[0, :5].tolist() == [7, -8, 7, -8, 0]
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=128, symmetric=True)
    expected = quantize(weight, scales.float(), torch.zeros(1, 1), args, dtype=torch.int8)
    assert torch.equal(unpacked(codes), expected)
    for one, other in zip((codes, scales), packed_by_torch(weight, 128), strict=True):
        assert torch.equal(bits(one), bits(other))


def test_a_part_of_a_wider_matrix_is_packed_in_place() -> None:
    whole = spread_weight(8, 768, torch.float32)
    part = whole[3:, 256:512]
    for one, of_whole in zip(packed(part, 128), packed(whole, 128), strict=True):
        per_column = of_whole.shape[1] / 768
        assert torch.equal(one, of_whole[3:, int(256 * per_column) : int(512 * per_column)])


def test_what_the_kernel_of_4_bits_cannot_take_is_refused() -> None:
    codes, scales = torch.empty(4, 16, dtype=torch.int32), torch.empty(4, 1, dtype=torch.bfloat16)
    for weight, group, error in (
        (torch.zeros(4, 128).half(), 128, "float16"),
        (
            torch.zeros(4, 96),
            128,
            r"shape \(4, 96\) and groups of 128; it must be a matrix, its columns a multiple of 32",
        ),
        (torch.zeros(4, 128), 48, "groups of 48"),
        (torch.zeros(128, 4).t(), 128, "rows must be contiguous"),
        (torch.zeros(4, 256), 128, r"codes has shape \(4, 16\), expected \(4, 32\)"),
        (torch.zeros(4, 128), 64, r"scales has shape \(4, 1\), expected \(4, 2\)"),
    ):
        with pytest.raises(ValueError, match=error):
            quantize_int4(weight, group, codes, scales)


@pytest.mark.parametrize("block", [(128, 128), (3, 5), (1, WHOLE)])
def test_a_weight_is_made_again_from_each_value_and_its_own_blocks_scale(block: tuple[int, int]) -> None:
    rows, columns = 200, 300
    down, along = block[0], block[1] or columns
    values = (torch.randn(rows, columns) * 100).to(FP8)
    scales = torch.rand(-(-rows // down), -(-columns // along)) + 0.01
    own = scales[torch.arange(rows)[:, None] // down, torch.arange(columns) // along]
    exact = values.double() * own.double()
    assert torch.equal(widened(values, scales, block, torch.float32), exact.float())
    assert torch.equal(widened(values, scales, block, torch.bfloat16), exact.float().bfloat16())


def test_a_scale_that_ranks_agree_on_is_the_kernels_own() -> None:
    weight = torch.randn(6, 300) * torch.tensor([0.0, 1e-9, 1e-3, 1.0, 50.0, 1e6])[:, None]
    assert torch.equal(scale_of(weight.abs().amax(dim=1)), quantised(weight, (1, 300))[1][:, 0])
