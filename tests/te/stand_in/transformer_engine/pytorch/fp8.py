"""FP8: the context that Megatron enters around each layer, and rounding to e4m3 in blocks.

Factors of forward products are rounded, one scale to a block along the last dimension. Gradients are not: backward
multiplies them by the rounded factors. The real kernels round gradients too, and blocks of weights have two dimensions.
Experts' rows are padded and checked, their factors are not rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3


class FP8GlobalStateManager:
    """State of FP8, as far as Megatron and the stand-in ask for it."""

    recipes: ClassVar[list[Any]] = []  # of the contexts that are entered, innermost last
    rounded: ClassVar[set[tuple[str, int]]] = set()  # recipes that rounded factors, with their rows

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return bool(cls.recipes)

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipes[-1] if cls.recipes else None


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    assert not enabled or hasattr(fp8_recipe, "block"), fp8_recipe
    if not enabled:
        yield
        return
    FP8GlobalStateManager.recipes.append(fp8_recipe)
    try:
        yield
    finally:
        FP8GlobalStateManager.recipes.pop()


def fp8_model_init(enabled: bool = True, **_: Any) -> Any:
    if enabled:
        raise NotImplementedError("the stand-in of Transformer Engine has no parameters in FP8")
    return contextlib.nullcontext()


def check_splits(splits: list[int]) -> None:
    """Refuses rows of an expert that are not padded as Megatron does (`get_align_size_for_quantization`)."""
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    assert recipe is None or all(rows % recipe.align == 0 for rows in splits), f"rows of experts: {splits}"


class Fp8Padding(torch.nn.Module):
    """Pads each expert's rows with zeros to the recipe's multiple."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        assert align_size is None

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        align = FP8GlobalStateManager.get_fp8_recipe().align
        padded = [-(-rows // align) * align for rows in m_splits]
        parts = [
            torch.nn.functional.pad(part, (0, 0, 0, rows - len(part)))
            for part, rows in zip(inp.split(list(m_splits)), padded, strict=True)
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(Fp8Padding):
    """Takes the padding of `Fp8Padding` away."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]
        align = FP8GlobalStateManager.get_fp8_recipe().align
        padded = [-(-rows // align) * align for rows in m_splits]
        return torch.cat([part[:rows] for part, rows in zip(inp.split(padded), m_splits, strict=True)])


def rounded(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of a product as the innermost recipe rounds them; themselves without one."""
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    if recipe is None:
        return x, weight
    rows = x.numel() // x.shape[-1]
    for tensor in (x, weight):  # `assert_dim_for_fp8_exec`; rows by what a full block along them needs
        assert tensor.shape[-1] % 16 == 0, f"FP8 execution requires the last dimension to be divisible by 16: {tensor}"
    assert rows % recipe.block == 0, f"{rows} rows do not fill blocks of {recipe.block}"
    FP8GlobalStateManager.rounded.add((type(recipe).__name__, rows))
    return _Rounding.apply(x, recipe.block), _Rounding.apply(weight, recipe.block)


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int) -> Tensor:
        padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % block))
        blocks = padded.unflatten(-1, (-1, block))
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
        scale = scale.log2().ceil().exp2()  # powers of two, as the recipes' default
        back = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
        return back.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
