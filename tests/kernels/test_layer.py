"""Operations of a layer on CPU, and their gradients, against the plain-torch twins in float64, over odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.cpu import layer_ops, torch_twins

ROWS = st.sampled_from([0, 1, 5, 63, 64, 65, 200])
WIDTHS = st.sampled_from([1, 15, 16, 17, 64, 100])
SEEDS = st.integers(0, 1000)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def agree(kernel: Callable[..., Tensor], twin: Callable[..., Tensor], inputs: list[Tensor], *sizes: float) -> None:
    """Checks that values and all gradients of the float32 kernel match the twin in float64.

    `sizes` scales the tolerance of the values and of each gradient: the size of the terms that are rounded.
    """
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    got, expected = kernel(*leaves), twin(*exact)
    gradient = randn(*got.shape, seed=9)
    # Gradients can have any layout; this one is column-major.
    grads = torch.autograd.grad(got, leaves, gradient.t().contiguous().t() if gradient.ndim == 2 else gradient)
    exact_grads = torch.autograd.grad(expected, exact, gradient.double())
    for actual, wanted, size in zip((got, *grads), (expected, *exact_grads), sizes, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=2e-6 * size, rtol=2e-6)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, width=WIDTHS, size=st.sampled_from([1e-4, 1.0, 1e4]), seed=SEEDS)
def test_the_norm_and_its_gradients_match_float64(rows, width, size, seed):
    x, weight = randn(rows, width, seed=seed) * size, randn(width, seed=seed + 1)
    steepest = float(weight.abs().max() * (x.square().mean(-1) + 1e-6).rsqrt().amax()) if rows else 0.0
    agree(
        lambda x, w: layer_ops.rms_norm(x, w, 1e-6),
        lambda x, w: torch_twins.add_rms_norm(x, None, w, 1e-6),
        [x, weight],
        *(4, 4 * steepest, 4 * rows**0.5),
    )


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, width=WIDTHS, scale=st.sampled_from([1.0, 30.0, 1e4]), seed=SEEDS)
def test_the_gated_activation_and_its_gradient_match_float64(rows, width, scale, seed):
    agree(layer_ops.silu_mul, torch_twins.silu_mul, [randn(rows, 2 * width, seed=seed) * scale], scale, scale)


@settings(max_examples=60, deadline=None)
@given(
    tokens=ROWS, heads=st.integers(1, 3), dim=st.sampled_from([2, 14, 16, 30, 64, 128]), seed=SEEDS
)  # fmt: skip
def test_the_rotation_and_its_gradient_match_float64(tokens, heads, dim, seed):
    angles = randn(tokens, dim // 2, seed=seed + 1) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    agree(
        lambda x: layer_ops.rotate(x, cos_sin),
        lambda x: torch_twins.rotate(x, cos_sin.double()),
        [randn(tokens, heads, dim, seed=seed)],
        *(4, 4),
    )


def test_slices_of_a_tensor_give_the_same_bits():
    whole, weight = randn(7, 3, 48, seed=0), randn(16, seed=1)
    part = whole[..., 16:32]
    assert torch.equal(layer_ops.rms_norm(part, weight, 1e-6), layer_ops.rms_norm(part.contiguous(), weight, 1e-6))
    assert torch.equal(layer_ops.silu_mul(part), layer_ops.silu_mul(part.contiguous()))
    cos_sin = randn(7, 16, seed=2)
    assert torch.equal(layer_ops.rotate(part, cos_sin), layer_ops.rotate(part.contiguous(), cos_sin))


def test_the_number_of_threads_changes_no_bit():
    x, weight, gradient = randn(3000, 64, seed=0), randn(64, seed=1), randn(3000, 64, seed=2)
    results = []
    threads = torch.get_num_threads()
    for number in (1, 3):
        torch.set_num_threads(number)
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = layer_ops.silu_mul(layer_ops.rms_norm(*leaves, 1e-6).repeat(1, 2))
        results.append((out, *torch.autograd.grad(out, leaves, gradient)))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_ops.rms_norm(randn(3, 4, seed=0).double(), randn(4, seed=0), 1e-6), "dtype torch.float64"),
        (lambda: layer_ops.rms_norm(randn(3, 4, seed=0), randn(5, seed=0), 1e-6), "weight has shape"),
        (lambda: layer_ops.silu_mul(randn(3, 4, seed=0).half()), "dtype torch.float16"),
        (lambda: layer_ops.silu_mul(randn(3, 5, seed=0)), "gate_up has shape"),
        (lambda: layer_ops.rotate(randn(3, 2, 7, seed=0), randn(3, 7, seed=0)), "heads of 7 elements"),
        (lambda: layer_ops.rotate(randn(3, 2, 8, seed=0), randn(2, 8, seed=0)), "cos_sin has shape"),
        (lambda: layer_ops.rotate(randn(3, 2, 8, seed=0), randn(3, 8, seed=0).double()), "cos_sin has dtype"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
