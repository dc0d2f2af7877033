"""Operations between the matrix products of a layer in training on CPU, in float32, with gradients.

Each forward and each backward is one pass over the activations. Torch's own operations take several passes, each with
an intermediate tensor. `megarl.cpu.torch_twins` has the plain-torch twins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.cpu import decode
from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.native import _C, check_on_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm, `x / sqrt(mean(x^2) + eps) * weight`, over the last dimension (arXiv:1910.07467).

    x is `[..., width]`, weight `[width]`, both float32 on the CPU. Differentiable in both.

    Raises:
        ValueError: another dtype or device, or a weight of another width.
    """
    return _RmsNorm.apply(x, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Computes `silu(gate) * up` `[..., width]` from the halves of `gate_up` `[..., 2 * width]`.

    This is SwiGLU (arXiv:2002.05202). `gate_up` is float32 on the CPU. Differentiable.

    Raises:
        ValueError: another dtype or device.
    """
    return _SiluMul.apply(gate_up)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Applies rotary embedding to `x` `[tokens, heads, dim]` with `cos_sin` `[tokens, dim]`, cosines then sines.

    The layout is GPT-NeoX's: the halves of a head are rotated (arXiv:2104.09864). Both tensors are float32 on the CPU.
    Differentiable in x.

    Raises:
        ValueError: another dtype or device, another shape of `cos_sin`, or an odd `dim`.
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
    @first_derivative_only("rms_norm", "megarl.cpu.torch_twins.add_rms_norm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (rows, width), grad_rows = x.shape, _rows(grad)
        check_on_cpu("grad", grad_rows, (rows, width))
        grad_x, grad_weights = torch.empty_like(x), x.new_empty(-(-rows // _C.rows_per_block), width)
        _C.rms_norm_backward(
            *(torch.get_num_threads(), rows, width, x.data_ptr(), weight.data_ptr(), ctx.eps, grad_rows.data_ptr()),
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
    @first_derivative_only("silu_mul", "megarl.cpu.torch_twins.silu_mul")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, width, grad_rows = len(gate_up), grad.shape[-1], _rows(grad)
        check_on_cpu("grad", grad_rows, (rows, width))
        out = torch.empty_like(gate_up)
        _C.silu_mul_backward(
            *(torch.get_num_threads(), rows, width, gate_up.data_ptr(), grad_rows.data_ptr(), out.data_ptr())
        )
        return out.view(*grad.shape[:-1], 2 * width)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return _rotated(x, cos_sin, back=False)

    @staticmethod
    @first_derivative_only("rotate", "megarl.cpu.torch_twins.rotate")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (cos_sin,) = ctx.saved_tensors
        return _rotated(grad, cos_sin, back=True), None


def _rotated(x: Tensor, cos_sin: Tensor, back: bool) -> Tensor:
    x = x.contiguous()
    tokens, heads, dim = x.shape
    if dim % 2:
        raise ValueError(f"x has heads of {dim} elements; the halves of a head are rotated, so the number must be even")
    check_on_cpu("x", x, (tokens, heads, dim))
    check_on_cpu("cos_sin", cos_sin, (tokens, dim))
    out = torch.empty_like(x)
    _C.rotate(*(torch.get_num_threads(), tokens, heads, dim, x.data_ptr(), cos_sin.data_ptr(), back, out.data_ptr()))
    return out


def _rows(x: Tensor) -> Tensor:
    """Reshapes x to contiguous `[rows, width]`."""
    return x.reshape(-1, x.shape[-1]).contiguous()
