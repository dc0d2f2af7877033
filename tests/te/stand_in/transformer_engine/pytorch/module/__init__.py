"""Linear layers and norms: parameters, marks and collectives as in the real modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from transformer_engine.kernels import kernel
from transformer_engine.pytorch.distributed import exchange
from transformer_engine.pytorch.fp8 import check_splits, rounded
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, check_buffer, get_dummy_wgrad
from transformer_engine.signatures import taken

LINEAR = (
    "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
    "rng_tracker_name init_method bias return_bias params_dtype parallel_mode device ub_name name"
)
OVERLAP = "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad"  # of layers cut over tp


class _AddingToMainGrad(torch.autograd.Function):
    """`x @ values.t()`, the weight's values, whose backward adds the weight's gradient to `weight.main_grad`.

    Of a step's first microbatch it overwrites, as the real one does (linear.py:835).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, values: Tensor, first: bool | None) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.first = first
        ctx.weight = weight  # the parameter itself, which has the marks
        return F.linear(x, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, values), weight = ctx.saved_tensors, ctx.weight
        rows = grad.reshape(-1, grad.shape[-1])
        product = rows.t().to(weight.main_grad.dtype) @ x.reshape(-1, x.shape[-1]).to(weight.main_grad.dtype)
        (weight.main_grad.copy_ if ctx.first else weight.main_grad.add_)(product)
        weight.grad_added_to_main_grad = True
        dummy = get_dummy_wgrad(list(weight.shape), x.dtype, getattr(weight, "zero_out_wgrad", False))
        return grad @ values, dummy, None, None


class _GroupedProduct(torch.autograd.Function):
    """One product for each group of rows, as one call; likewise for the gradients of rows and of weights."""

    @staticmethod
    def forward(
        ctx: Any, splits: list[int], accumulates: bool, first: bool | None, x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.splits, ctx.accumulates, ctx.first, ctx.weights = splits, accumulates, first, weights
        ctx.save_for_backward(x)
        with kernel("grouped_gemm"):
            return torch.cat([F.linear(part, w) for part, w in zip(x.split(splits), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,), weights = ctx.saved_tensors, ctx.weights
        pairs = list(zip(grad.split(ctx.splits), x.split(ctx.splits), strict=True))
        with kernel("grouped_gemm"):
            x_grad = torch.cat([rows @ w for (rows, _), w in zip(pairs, weights, strict=True)])
        with kernel("grouped_gemm"):
            if not ctx.accumulates:
                return None, None, None, x_grad, *(rows.t() @ part for rows, part in pairs)
            for (rows, part), w in zip(pairs, weights, strict=True):
                product = rows.t().to(w.main_grad.dtype) @ part.to(w.main_grad.dtype)
                (w.main_grad.copy_ if ctx.first else w.main_grad.add_)(product)
                w.grad_added_to_main_grad = True
        dummies = [get_dummy_wgrad(list(w.shape), x.dtype, getattr(w, "zero_out_wgrad", False)) for w in weights]
        return None, None, None, x_grad, *dummies


def _mark(parameter: Tensor, dim: int) -> None:
    """`set_tensor_model_parallel_attributes` of the real package, which marks weights without parallelism too."""
    assert not hasattr(parameter, "tensor_model_parallel")
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


class _LinearBase(TransformerEngineBaseModule):
    def _set_up(self, a: SimpleNamespace) -> None:
        self.tp_size = a.tp_size if a.tp_group is None else a.tp_group.size()
        self.tp_group, self.parallel_mode = a.tp_group, a.parallel_mode
        self.in_features, self.out_features = a.in_features, a.out_features
        assert a.parallel_mode in (None, "column", "row"), a.parallel_mode
        for mode, name in (("column", "out_features"), ("row", "in_features")):
            if a.parallel_mode == mode:
                size = getattr(self, name)
                assert size % self.tp_size == 0, f"{name}={size} over {self.tp_size} ranks"
                setattr(self, name, size // self.tp_size)
        self.sequence_parallel = self.tp_size > 1 and a.sequence_parallel
        overlaps = getattr(a, "ub_overlap_ag", False) or getattr(a, "ub_overlap_rs", False)
        self.buffer = a.ub_name if overlaps else None
        self.save_original_input = False  # Megatron sets it; here inputs are never saved in 8 bits
        self.fuse_wgrad_accumulation, self.use_bias, self.return_bias = a.fuse_wgrad_accumulation, a.bias, a.return_bias

    def _add(self, suffix: str, a: SimpleNamespace) -> None:
        """Adds `weight` and `bias` with a suffix, as `register_parameter` and `reset_parameters` do."""
        options = {"device": a.device, "dtype": a.params_dtype}
        weight = Parameter(torch.empty(self.out_features, self.in_features, **options))
        (a.init_method or torch.nn.init.normal_)(weight)
        _mark(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(f"weight{suffix}", weight)
        if not a.bias:
            setattr(self, f"bias{suffix}", torch.empty(0, **options))
            return
        bias = Parameter(torch.zeros(self.out_features, **options))
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            _mark(bias, 0)
        self.register_parameter(f"bias{suffix}", bias)

    def _product(self, x: Tensor, weight: Tensor, first: bool | None) -> Tensor:
        x, values = rounded(x, weight)
        if not (self.fuse_wgrad_accumulation and weight.requires_grad):  # a frozen weight has no main_grad
            return F.linear(x, values)
        return _AddingToMainGrad.apply(x, weight, values.detach(), first)


class Linear(_LinearBase):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        a = taken("Linear.__init__", f"{LINEAR} {OVERLAP}", args, kwargs)
        self._set_up(a)
        self._add("", a)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        a = taken("Linear.forward", "inp is_first_microbatch", args, kwargs)
        return self._linear(a.inp, a.is_first_microbatch)

    def _linear(self, x: Tensor, first: bool | None) -> Any:
        gathered = ("all_gather", "reduce_scatter") if self.sequence_parallel else ("nothing", "all_reduce")
        scattered = ("reduce_scatter", "all_gather") if self.sequence_parallel else ("all_reduce", "nothing")
        if self.parallel_mode == "column":
            x = exchange(x, self.tp_group, *gathered)
        if self.buffer is not None and self.sequence_parallel:
            check_buffer(self.buffer, x.numel() // x.shape[-1])
        out = self._product(x, self.weight, first)
        if self.parallel_mode == "row":
            out = exchange(out, self.tp_group, *scattered)
        if self.use_bias and not self.return_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """A norm before a column parallel layer, in one module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        TransformerEngineBaseModule.__init__(self)
        names = f"{LINEAR} {OVERLAP} eps normalization zero_centered_gamma".replace("rng_tracker_name ", "")
        a = taken("LayerNormLinear.__init__", names, args, kwargs)
        assert a.normalization == "RMSNorm", a.normalization
        self._set_up(a)
        self.eps, self.offset = a.eps, float(a.zero_centered_gamma)
        self.layer_norm_weight = Parameter(
            torch.full((a.in_features,), 1.0 - self.offset, device=a.device, dtype=a.params_dtype)
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self._add("", a)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        a = taken("LayerNormLinear.forward", "inp is_first_microbatch", args, kwargs)
        normed = _rms_norm(a.inp, self.layer_norm_weight, self.eps, self.offset)
        return self._linear(normed, a.is_first_microbatch)


class GroupedLinear(_LinearBase):
    """Linear layers with parameters `weight0`, `weight1`, ..., on consecutive rows. No collectives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        a = taken("GroupedLinear.__init__", f"num_gemms {LINEAR}".removesuffix(" name"), args, kwargs)
        self._set_up(a)
        assert a.parallel_mode is None or self.tp_size == 1, "the real one has no collectives either"
        self.num_gemms = a.num_gemms
        for index in range(a.num_gemms):
            self._add(str(index), a)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        a = taken("GroupedLinear.forward", "inp m_splits is_first_microbatch", args, kwargs)
        assert len(a.m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        check_splits(list(a.m_splits))
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        first = a.is_first_microbatch if self.fuse_wgrad_accumulation else None
        out = _GroupedProduct.apply(list(a.m_splits), self.fuse_wgrad_accumulation, first, a.inp, *weights)
        if self.use_bias and not self.return_bias:
            parts = zip(out.split(list(a.m_splits)), biases, strict=True)
            out = torch.cat([part + bias for part, bias in parts])
        return (out, biases) if self.return_bias else out


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


class RMSNorm(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        names = "normalized_shape eps sequence_parallel params_dtype zero_centered_gamma kwargs"
        a = taken("RMSNorm.__init__", names, args, kwargs)
        self.eps, self.zero_centered_gamma = a.eps, a.zero_centered_gamma
        options = {"device": a.kwargs.get("device"), "dtype": a.params_dtype}
        self.weight = Parameter(torch.full((a.normalized_shape,), 1.0 - a.zero_centered_gamma, **options))
        if a.sequence_parallel is not None:
            self.weight.sequence_parallel = a.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight, self.eps, float(self.zero_centered_gamma))


class LayerNorm(torch.nn.Module):
    """Never built by megarl's models; Megatron names the class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the stand-in of Transformer Engine has no LayerNorm")
