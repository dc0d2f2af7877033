"""What a layer does between its matrix products in training on CPU, in float32, each with its gradient in one pass.

Torch's operations of the same names take several passes over the activations, each with a tensor of its own in
between. `megarl.ops.torch_twins` has the plain-torch twins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.cpu import decode
from megarl.ops.native import _C, check_on_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv:1910.07467): x `[..., width]`, weight
    `[width]`, both float32 on the CPU. Differentiable in both.

    Raises:
        ValueError: another dtype or device, or a weight of another width.
    """
    return _RmsNorm.apply(x, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` `[..., width]` of the halves of `gate_up` `[..., 2 * width]`, float32 on the CPU (SwiGLU,
    arXiv:2002.05202). Differentiable.

    Raises:
        ValueError: another dtype or device.
    """
    return _SiluMul.apply(gate_up)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding of `x` `[tokens, heads, dim]` by `cos_sin` `[tokens, dim]`, cosines then sines: the halves of a
    head are rotated into each other (arXiv:2104.09864, in the layout of GPT-NeoX). float32 on the CPU; differentiable
    in x.

    Raises:
        ValueError: another dtype or device, another shape of the table, or an odd `dim`.
    """
    return _Rotate.apply(x, cos_sin)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = _rows(x)
        ctx.save_for_backward(rows, weight)
        ctx.eps = eps
        return decode.add_rms_norm(rows, None, weight, eps).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (rows, width), given = x.shape, _rows(grad)
        check_on_cpu("grad", given, (rows, width))
        grad_x, grad_weights = torch.empty_like(x), x.new_empty(-(-rows // _C.rows_per_block), width)
        _C.rms_norm_backward(
            *(torch.get_num_threads(), rows, width, x.data_ptr(), weight.data_ptr(), ctx.eps, given.data_ptr()),
            *(grad_x.data_ptr(), grad_weights.data_ptr()),
        )
        return grad_x.view(grad.shape), grad_weights.sum(0), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows = _rows(gate_up)
        ctx.save_for_backward(rows)
        return decode.silu_mul(rows).view(*gate_up.shape[:-1], rows.shape[1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, width, given = len(gate_up), grad.shape[-1], _rows(grad)
        check_on_cpu("grad", given, (rows, width))
        out = torch.empty_like(gate_up)
        _C.silu_mul_backward(
            *(torch.get_num_threads(), rows, width, gate_up.data_ptr(), given.data_ptr(), out.data_ptr())
        )
        return out.view(*grad.shape[:-1], 2 * width)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return _rotated(x, cos_sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        return _rotated(grad, cos_sin, back=True), None


def _rotated(x: Tensor, cos_sin: Tensor, back: bool) -> Tensor:
    x = x.contiguous()
    tokens, heads, dim = x.shape
    if dim % 2:
        raise ValueError(f"x has heads of {dim} elements; halves are rotated into each other, so their number is even")
    check_on_cpu("x", x, (tokens, heads, dim))
    check_on_cpu("cos_sin", cos_sin, (tokens, dim))
    out = torch.empty_like(x)
    _C.rotate(*(torch.get_num_threads(), tokens, heads, dim, x.data_ptr(), cos_sin.data_ptr(), back, out.data_ptr()))
    return out


def _rows(x: Tensor) -> Tensor:
    """`[rows, width]`, contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()
