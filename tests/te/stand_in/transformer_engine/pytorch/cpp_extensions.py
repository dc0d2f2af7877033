"""The matrix product that Megatron's router calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_engine.signatures import taken


def general_gemm(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Product of row-major matrices; in layout "TN" of `B` and `A` transposed, as cuBLAS counts from columns."""
    names = "A B out_dtype gelu gelu_in layout out bias use_split_accumulator grad"
    a = taken("cpp_extensions.general_gemm", names, args, kwargs)
    assert a.out is None
    assert not a.gelu
    left, right = (a.B.t() if a.layout[1] == "T" else a.B), (a.A.t() if a.layout[0] == "T" else a.A)
    out = left.to(a.out_dtype) @ right.to(a.out_dtype)
    if a.bias is not None:
        assert not a.grad
        assert a.bias.dtype == a.out_dtype, "cuBLAS reads the bias as the output's type"
        out = out + a.bias
    return out, None, None, None
