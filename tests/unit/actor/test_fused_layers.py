"""Layers around Transformer Engine's: SwiGLU as one kernel, and inputs recomputed in backward."""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from torch import Tensor, nn

from megarl.actor.model.fused_layers import recomputing_input


@pytest.fixture
def eager() -> Iterator[None]:
    """Runs Megatron's compiled functions as they are written: a compiler is not always there."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def unfused(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def with_gradient(function: Any, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    output = function(x)
    output.backward(upstream.to(x.dtype))
    assert x.grad is not None
    return output.detach().double(), x.grad.double()


def worst(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_megatrons_swiglu_is_near_to_float64(dtype: torch.dtype, bound: float) -> None:
    """Written out, each operation of its backward rounds: in bfloat16 its error is twice that of autograd."""
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(64, 1, n, generator=generator).mul(3).to(dtype) for n in (192, 96))
    exact = with_gradient(unfused, x.double(), upstream)
    assert worst(with_gradient(lambda gate_up: bias_swiglu_impl(gate_up, None), x, upstream), exact) <= bound


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's SwiGLU from a copy of its module that the compiler, which `make test-long` turns off, has compiled."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    specification = importlib.util.spec_from_file_location("compiled_swiglu", fused_bias_swiglu.__file__)
    assert specification is not None
    assert specification.loader is not None
    copy = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    specification.loader.exec_module(copy)
    return copy.bias_swiglu_impl


@pytest.mark.long
def test_compiled_swiglu_rounds_once_in_bfloat16(compiled: Any) -> None:
    """The compiled kernel computes in float32 and rounds its result; the unfused one rounds silu's as well."""
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(64, 1, n, generator=generator).mul(3).bfloat16() for n in (192, 96))
    exact = with_gradient(unfused, x.double(), upstream)
    found = with_gradient(lambda gate_up: compiled(gate_up, None), x, upstream)
    assert torch.equal(found[0], exact[0].bfloat16().double())
    assert worst(found, exact) <= worst(with_gradient(unfused, x, upstream), exact)


def test_an_input_is_freed_and_computed_again_to_the_bit() -> None:
    torch.manual_seed(0)
    norm, linear = nn.RMSNorm(16), nn.Linear(16, 8)
    x = torch.randn(5, 16)
    expected = with_gradient(lambda x: linear(norm(x)), x, torch.ones(5, 8))
    weights = [p.grad.clone() for p in (*norm.parameters(), *linear.parameters()) if p.grad is not None]
    nn.Module.zero_grad(norm)
    nn.Module.zero_grad(linear)
    computed: list[weakref.ref[Tensor]] = []

    def watched(x: Tensor) -> Tensor:
        output: Tensor = norm(x)
        computed.append(weakref.ref(output.untyped_storage()))  # type: ignore[arg-type]
        return output

    x.requires_grad_()
    output = recomputing_input(watched, x, linear)
    assert len(computed) == 1
    assert computed[0]() is None, "the norm's output is kept"
    output.backward(torch.ones(5, 8))
    assert len(computed) == 2
    assert torch.equal(output.double(), expected[0])
    assert x.grad is not None
    assert torch.equal(x.grad.double(), expected[1])
    again = [p.grad for p in (*norm.parameters(), *linear.parameters()) if p.grad is not None]
    assert len(weights) == 3
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_nothing_is_computed_again_without_a_gradient_or_without_tokens() -> None:
    norm, linear = nn.RMSNorm(16), nn.Linear(16, 8)
    with torch.no_grad():
        assert recomputing_input(norm, torch.randn(5, 16), linear).shape == (5, 8)
    empty = recomputing_input(norm, torch.randn(0, 16, requires_grad=True), linear)
    empty.sum().backward()
    assert linear.weight.grad is not None
    assert not linear.weight.grad.any()
