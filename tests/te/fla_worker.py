"""Runs flash-linear-attention's own Triton kernels on the CPU, in Triton's interpreter, beside megarl's plain torch.

    fla_worker.py MODEL

Prints a line of JSON for each case, with the largest differences of outputs and of gradients, relative to the largest
element. Two things of a GPU are stood in for: the autotuner takes its first configuration, because timing needs a
driver, and loop counters have `.to`, as in compiled kernels. Not covered: compilation, and products in lower precision.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *arguments, config, **meta: [0.0]

from megarl.actor.model.attention import delta_net  # noqa: E402
from megarl.actor.model.attention.delta_rule import causal_convolution, gated_delta_rule, plan_recurrence, unit_length  # noqa: E402
from megarl.types import cu_seqlens_of  # noqa: E402
from tests.unit.actor.test_delta_net import trained  # noqa: E402

PACKS = {"short": [3, 1, 2], "chunks": [5, 64, 2, 70, 130, 1]}
SIZES = {"odd": (2, 9, 14), "published": (1, 128, 128)}  # heads, key dim, value dim


class Index(int):
    """Loop counter of a kernel."""

    def to(self, dtype: object) -> Index:
        """Stays as it is: the interpreter computes with Python's integers."""
        return self


def indices(*bounds: int) -> Iterator[Index]:
    return map(Index, range(*bounds))


def furthest(mine: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Largest difference of two lists of tensors, each relative to the largest element of `other`."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, other, strict=True))


def compare(case: str, inputs: list[Tensor], kernel: Callable[..., Tensor], plain: Callable[..., Tensor]) -> None:
    """Compares outputs and gradients of all inputs, under one random gradient of the output."""
    results = []
    for function in (kernel, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = function(*leaves)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        results.append((output.detach(), torch.autograd.grad(output, leaves, weights)))
    (output, gradients), (expected, expected_gradients) = results
    figures = {"outputs": furthest([output], [expected]), "gradients": furthest(gradients, expected_gradients)}
    print(json.dumps({"case": case, **figures}), flush=True)


def kernels() -> None:
    """Compares both kernels, called as a layer calls them."""
    megatron = delta_net.megatron_delta_net
    for pack, lengths in PACKS.items():
        plan = plan_recurrence(cu_seqlens_of(torch.tensor(lengths)), torch.device("cpu"))
        bounds = delta_net.PackedDeltaNet._bounds(plan)
        total = sum(lengths)
        for size, (heads, key_dim, value_dim) in SIZES.items():
            drawn = torch.Generator().manual_seed(total)
            q, k = (unit_length(torch.randn(total, heads, key_dim, generator=drawn)) for _ in range(2))
            value = torch.randn(total, heads, value_dim, generator=drawn)
            g = -torch.randn(total, heads, generator=drawn).exp() * 0.3
            beta = torch.rand(total, heads, generator=drawn)
            compare(
                f"rule, {pack} sequences, {size} sizes",
                [q, k, value, g, beta],
                lambda q, k, v, g, b, bounds=bounds: megatron.chunk_gated_delta_rule(
                    q[None], k[None], v[None], g=g[None], beta=b[None], **bounds
                )[0][0],
                lambda *parts, plan=plan: gated_delta_rule(*parts, plan),
            )
        x = torch.randn(total, 40, generator=drawn)
        compare(
            f"convolution, {pack} sequences",
            [x, torch.randn(40, 4, generator=drawn)],
            lambda x, w, bounds=bounds: megatron.causal_conv1d(x=x[None], weight=w, activation="silu", **bounds)[0][0],
            lambda x, w, plan=plan: causal_convolution(x, w, plan.positions),
        )


def model(folder: str) -> None:
    """Compares log-probs and gradients of a model with the kernels and without (tests/unit/actor/test_delta_net.py)."""
    logprobs, gradients = trained(folder)
    once = delta_net.PackedDeltaNet.__init__

    def fused(self: delta_net.PackedDeltaNet, *arguments: object, **fields: object) -> None:
        once(self, *arguments, **{**fields, "fused": True})

    delta_net.PackedDeltaNet.__init__ = fused
    kernel_logprobs, kernel_gradients = trained(folder)
    names = [name for name, gradient in gradients.items() if gradient.any()]
    figures = {
        "outputs": float((kernel_logprobs - logprobs).abs().max()),
        "gradients": furthest([kernel_gradients[n] for n in names], [gradients[n] for n in names]),
    }
    print(json.dumps({"case": "model", "names": len(names), **figures}), flush=True)


if __name__ == "__main__":
    delta_net.check_kernels()
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            module.range = indices
    kernels()
    model(sys.argv[1])
