"""Log-prob (and entropy) of labels, forward and backward, against torch eager, torch.compile and memory copies.

    OMP_NUM_THREADS=2 python benchmarks/logprob.py [--tokens 2048] [--vocab 32000 151936]

On a GPU also against Liger-Kernel where it is installed. Every figure is a ratio within this run. There, the
host's time to issue a call tells whether the kernel or Python is slow: near 100%, the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timing import host_seconds, machine, parse, record, side_by_side, with_warm_allocator
from torch import Tensor

from megarl.ops import logprob_kernels as kernels


def eager_logprob(x: Tensor, labels: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(1, labels.unsqueeze(1)).squeeze(1)


def eager_with_entropy(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    p = x.softmax(-1)
    all_logprobs = x.log_softmax(-1)
    return all_logprobs.gather(1, labels.unsqueeze(1)).squeeze(1), -(p * all_logprobs).sum(-1)


@dataclass
class Case:
    """One dtype and shape: inputs, and each side as functions of nothing."""

    logits: Tensor
    labels: Tensor
    g: Tensor

    def __post_init__(self) -> None:
        self.one = torch.ones(1, dtype=torch.float64, device=self.logits.device)
        vocab = self.logits.shape[1]
        self.key = (self.labels, self.one, vocab, 0)
        self.context = kernels.logprob_rows(self.logits, *self.key, True)[2]
        self.scratch = torch.empty_like(self.logits)

    def ours_forward(self, entropy: bool) -> None:
        kernels.logprob_rows(self.logits, *self.key, entropy)

    def ours_backward(self, entropy: bool) -> None:
        """In place: a copy of the logits is turned into their gradient. The values that it meets do not matter."""
        h = self.g if entropy else None
        labels, one, vocab, start = self.key
        kernels.logprob_backward_(self.scratch, labels, one, self.context, self.g, h, vocab, start)

    def backward_of(self, function: Callable[..., object], entropy: bool) -> Callable[[], object]:
        leaf = self.logits.detach().requires_grad_()
        out = function(leaf, self.labels)
        outputs = out if entropy else (out,)
        seeds = [self.g.to(o.dtype) for o in outputs]
        return lambda: torch.autograd.grad(outputs, leaf, seeds, retain_graph=True)

    def liger_backward(self) -> Callable[[], object] | None:
        """Liger's cross entropy computes the gradient in its forward pass: the fair match is forward + backward."""
        if not self.logits.is_cuda or not importlib.util.find_spec("liger_kernel"):
            return None
        from liger_kernel.transformers.functional import liger_cross_entropy

        leaf = self.logits.detach().requires_grad_()
        return lambda: torch.autograd.grad(liger_cross_entropy(leaf, self.labels, reduction="sum"), leaf)


def measure(device: str, dtype: torch.dtype, tokens: int, vocab: int, rounds: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocab, device=device, dtype=torch.float32).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    case = Case(logits, labels, torch.randn(tokens, device=device))
    case.scratch.copy_(logits)
    copy = {"copy": lambda: case.scratch.copy_(logits)}
    for entropy, eager in ((False, eager_logprob), (True, eager_with_entropy)):
        torch._dynamo.reset()
        compiled = torch.compile(eager)
        kind = "log-prob+entropy" if entropy else "log-prob"
        facts = {"device": device, "dtype": str(dtype)[6:], "vocab": vocab, "kind": kind}
        with torch.no_grad():
            t = side_by_side(
                {
                    "ours": lambda entropy=entropy: case.ours_forward(entropy),
                    "eager": lambda eager=eager: eager(logits, labels),
                    "compile": lambda compiled=compiled: compiled(logits, labels),
                    **copy,
                },
                device=device,
                rounds=rounds,
            )
        # The forward pass reads once what a copy reads and writes: its floor is half of a copy.
        if device == "cuda":
            t["host"] = host_seconds(lambda entropy=entropy: case.ours_forward(entropy))
        report(facts | {"pass": "forward"}, t, floor=t["copy"] / 2)
        sides = {
            "ours": lambda entropy=entropy: case.ours_backward(entropy),
            "eager": case.backward_of(eager, entropy),
            "compile": case.backward_of(compiled, entropy),
            **copy,
        }
        liger = case.liger_backward() if not entropy else None
        if liger:
            sides["liger"] = liger
            sides["ours fwd+bwd"] = lambda: (case.ours_forward(False), case.ours_backward(False))
        t = side_by_side(sides, device=device, rounds=rounds)
        report(facts | {"pass": "backward"}, t, floor=t["copy"])


def report(facts: dict[str, str | int], t: dict[str, float], floor: float) -> None:
    """Prints and records one line; `floor` is the time of a copy that moves as many bytes."""
    ours = t["ours"]
    record("share of copy bandwidth", floor / ours, "share", **facts)
    record("over torch eager", t["eager"] / ours, "x", **facts)
    record("over torch.compile", t["compile"] / ours, "x", **facts)
    line = "{dtype:8s} V={vocab:6d} {kind:16s} {pass:8s}".format(**facts)
    line += f"  {ours * 1e3:8.2f} ms   {t['eager'] / ours:6.2f}x eager   {t['compile'] / ours:6.2f}x torch.compile"
    line += f"   {floor / ours:6.0%} of copy bandwidth"
    if "host" in t:
        record("host time of a call over its time", t["host"] / ours, "share", **facts)
        line += f"   the host alone {t['host'] / ours:.0%} of the time"
    if "liger" in t:
        record("forward and backward over Liger", t["liger"] / t["ours fwd+bwd"], "x", **facts)
        line += f"   forward+backward {t['liger'] / t['ours fwd+bwd']:.2f}x Liger"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--rounds", type=int, default=7)
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    args = parse(parser, each_device=True)
    for device in args.device:
        print(f"# {machine(device)}; T={args.tokens}")
        for dtype in args.dtype:
            for vocab in args.vocab:
                measure(device, getattr(torch, dtype), args.tokens, vocab, args.rounds)


if __name__ == "__main__":
    with_warm_allocator()
    main()
