"""Operators on tensors without values: shapes, dtypes and gradients of a real run, with nothing read or computed.

FakeTensorMode is how a model's memory is planned before there is a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megarl.ops import advantage
from megarl.ops.divergence import FullTeacher, Student, TopKTeacher, linear_divergence
from megarl.ops.logprob import gather_logprobs_entropy, linear_logprobs, linear_token_loss, vocab_parallel_logprobs
from megarl.ops.loss import PolicyLossSettings, policy_loss, segment_sum

Results = tuple[Tensor, ...]


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    labels: Tensor
    temperatures: Tensor
    cu_seqlens: Tensor
    mask: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype, device: str = "cpu") -> Inputs:
        x, weight = (torch.ones(n, 6, dtype=dtype, device=device, requires_grad=True) for n in (4, 8))
        labels, bounds = torch.arange(4, device=device), torch.arange(0, 5, 2, dtype=torch.int32, device=device)
        ones = torch.ones(4, device=device)
        return cls(x, weight, labels, ones, bounds, torch.ones_like(ones, dtype=torch.bool))


def rows(i: Inputs) -> Results:
    keys = {"vocab_valid": 6, "temperature": i.temperatures, "with_entropy": True}
    logprob, entropy = vocab_parallel_logprobs(i.x, i.labels, **keys)
    return logprob, entropy, *torch.autograd.grad((logprob + entropy).sum(), i.x)


def rows_in_place(i: Inputs) -> Results:
    logits = i.x * 1
    logprob, _ = vocab_parallel_logprobs(logits, i.labels, vocab_valid=6, inplace_backward=True)
    return logprob, *torch.autograd.grad(logprob.sum(), logits)


def gathered(i: Inputs) -> Results:
    return gather_logprobs_entropy(i.x.view(2, 2, 6), i.labels.view(2, 2), i.temperatures.view(2, 2))


def from_hidden(i: Inputs) -> Results:
    keys = {"vocab_valid": 6, "temperature": i.temperatures, "with_entropy": True, "chunk_rows": 3}
    logprob, entropy = linear_logprobs(i.x, i.weight, i.labels, **keys)
    return logprob, entropy, *torch.autograd.grad((logprob + entropy).sum(), (i.x, i.weight))


def token_loss(i: Inputs) -> Results:
    loss, logprob, _ = linear_token_loss(i.x, i.weight, i.labels, lambda logprobs, *_: logprobs.sin(), vocab_valid=6)
    return loss, logprob, *torch.autograd.grad(loss, (i.x, i.weight))


def divergences(i: Inputs) -> Results:
    student = Student(i.labels, i.labels, 6, 0, None, i.x.dtype, None)
    teachers = FullTeacher(i.x.detach(), i.weight.detach(), 6), TopKTeacher(i.labels[:, None], i.temperatures[:, None])
    results: list[Tensor] = []
    for teacher in teachers:
        values = linear_divergence(i.x, i.weight, student, teacher, beta=0.5, chunk_rows=3)
        loss = torch.stack(values).sum()
        results += [*values, *torch.autograd.grad(loss, (i.x, i.weight))]
    return tuple(results)


def losses(i: Inputs) -> Results:
    settings = PolicyLossSettings(ratio="sequence", entropy_coef=0.1, kl_estimator="k3", kl_coef=0.1)
    logprob = i.x[:, 0].contiguous()
    other = logprob.detach()
    more = {"ref_logprobs": other, "entropy": other, "cu_seqlens": i.cu_seqlens}
    loss, sums = policy_loss(logprob, other, other, i.mask, settings=settings, **more)
    return loss, sums, segment_sum(other, i.mask, i.cu_seqlens), *torch.autograd.grad(loss.sum(), i.x)


def advantages(i: Inputs) -> Results:
    r = i.temperatures
    gae = advantage.gae_packed(r, r, i.mask, i.cu_seqlens, lam=0.9)
    return *gae, advantage.group_advantage(r, i.labels), advantage.whiten(r, i.mask)


CALLS = [rows, rows_in_place, gathered, from_hidden, token_loss, divergences, losses, advantages]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fake_tensors_give_the_shapes_and_dtypes_of_a_real_run(
    call: Callable[[Inputs], Results], dtype: torch.dtype
) -> None:
    real = call(Inputs.make(dtype))
    with FakeTensorMode():
        fake = call(Inputs.make(dtype))
    assert all(isinstance(t, FakeTensor) for t in fake)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


def test_fake_tensors_of_a_gpu_go_forward_without_one() -> None:
    """Leaves out gradients and indexing, for which a torch without CUDA asks for the device, and so the LM head."""
    with FakeTensorMode(), torch.no_grad():
        i = Inputs.make(torch.bfloat16, "cuda")
        results = [
            *vocab_parallel_logprobs(i.x, i.labels, vocab_valid=6, temperature=i.temperatures),
            segment_sum(i.temperatures, i.mask, i.cu_seqlens),
            *advantages(i),
        ]
    assert {t.device.type for t in results if t is not None} == {"cuda"}
