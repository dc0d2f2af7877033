"""Second derivatives raise in one line, however they are asked for; `create_graph=True` costs nothing elsewhere."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megarl.cpu import layer_ops
from megarl.cpu.attention import Sequences, packed_attention
from megarl.ops.divergence import FullTeacher, Student, linear_divergence
from megarl.ops.known_gradients import logprobs_of_token_loss
from megarl.ops.linear_logprob import WideProduct
from megarl.ops.logprob import linear_logprobs, linear_token_loss, vocab_parallel_logprobs
from megarl.ops.loss import PolicyLossSettings, policy_loss

LABELS, M, ONES = torch.tensor([0, 1, 2, -1]), torch.ones(4, dtype=torch.bool), torch.ones(4)
CU = torch.tensor([0, 3, 4], dtype=torch.int32)
SEQUENCES = Sequences(CU, torch.arange(4), torch.zeros(2, dtype=torch.int64))


def rows(x: Tensor) -> Tensor:
    return vocab_parallel_logprobs(x, LABELS, vocab_valid=6)[0]


def entropy_in_place(x: Tensor) -> Tensor:
    keys = {"vocab_valid": 6, "with_entropy": True, "inplace_backward": True}
    return vocab_parallel_logprobs(x * 1, LABELS, **keys)[1]


def from_hidden(x: Tensor) -> Tensor:
    return linear_logprobs(x, torch.linspace(-1, 1, 36).view(6, 6), LABELS, vocab_valid=6)[0]


def of_weight(weight: Tensor) -> Tensor:
    return linear_logprobs(torch.linspace(-1, 1, 24).view(4, 6), weight, LABELS, vocab_valid=4)[0]


def token_loss(x: Tensor) -> Tensor:
    return linear_token_loss(x, torch.eye(6), LABELS, lambda logprobs, *_: logprobs.square(), vocab_valid=6)[0]


def told(x: Tensor) -> Tensor:
    def gradients(logprobs: Tensor, *_: object) -> tuple[Tensor]:
        return (torch.ones_like(logprobs),)

    keys = {"rows": torch.arange(3), "vocab_valid": 6, "with_entropy": False}
    return logprobs_of_token_loss(x, torch.eye(6), LABELS, gradients, **keys)[0]


def divergence(x: Tensor) -> Tensor:
    teacher = FullTeacher(torch.linspace(-1, 1, 18).view(3, 6), torch.eye(6), 6)
    student = Student(LABELS, torch.arange(3), 6, 0, None, torch.float32, None)
    return linear_divergence(x, torch.eye(6), student, teacher, beta=0.5)[2]


def clipped(x: Tensor, ratio: str = "token") -> Tensor:
    settings = PolicyLossSettings(ratio=ratio, clip_high=9.0, clip_low=0.9)
    return policy_loss(x[:, 0].contiguous(), ONES * 0, ONES, M, settings=settings, cu_seqlens=CU).loss


def attention(x: Tensor) -> Tensor:
    heads = x.view(4, 2, 3)
    return packed_attention(heads, heads, heads, SEQUENCES, 1.0)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "vocab_parallel_logprobs": rows,
    "vocab_parallel_logprobs, entropy in place": entropy_in_place,
    "linear_logprobs": from_hidden,
    "linear_logprobs, weight": of_weight,
    "linear_token_loss": token_loss,
    "logprobs_of_token_loss": told,
    "linear_divergence": divergence,
    "policy_loss": clipped,
    "policy_loss, sequence": lambda x: clipped(x, "sequence"),
    "packed_attention": attention,
    "rms_norm": lambda x: layer_ops.rms_norm(x, torch.ones(6), 1e-6),
    "silu_mul": layer_ops.silu_mul,
    "rotate": lambda x: layer_ops.rotate(x.view(4, 1, 6), torch.ones(4, 6)),
}


def leaf() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()


def constant_upstream(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a sum does not depend on what autograd sees: torch would hand out a result without a graph."""
    return operation(x).sum()


def another_term(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A penalty beside it reaches the same input: torch would hand out the penalty's second derivative alone."""
    return operation(x).sum() + x.pow(3).sum()


def upstream_with_a_graph(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return operation(x).square().sum()


@pytest.mark.parametrize("loss", [constant_upstream, another_term, upstream_with_a_graph])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_derivative_is_refused_in_one_line(name: str, loss: Callable[..., Tensor]) -> None:
    x = leaf()
    operation = name.split(",")[0]
    remedy = "full logits" if name == "linear_divergence" else r"megarl\.\w+\.torch_twins\.\w+"
    message = rf"^{operation} has no second derivative, but create_graph=True .* use {remedy}$"
    with pytest.raises(RuntimeError, match=message) as caught:
        torch.autograd.grad(loss(OPERATIONS[name], x), x, create_graph=True, allow_unused=True)
    if remedy != "full logits":
        assert callable(pkgutil.resolve_name(str(caught.value).rsplit(" ", 1)[1])), "the remedy exists"


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_first_derivative_is_given_also_inside_a_reentrant_checkpoint(name: str) -> None:
    x = leaf()
    (want,) = torch.autograd.grad(constant_upstream(OPERATIONS[name], x), x)
    torch.utils.checkpoint.checkpoint(OPERATIONS[name], x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, want)


def test_a_product_in_a_wider_dtype_has_its_second_derivative() -> None:
    x, weight = leaf(), torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def second(product: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(product(x, weight).square().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))

    wide = second(lambda x, weight: WideProduct.apply(x, weight, torch.float64))
    for got, want in zip(wide, second(lambda x, weight: x @ weight.t()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
