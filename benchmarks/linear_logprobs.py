"""LM head and log-prob in chunks: time and peak memory, forward and backward, against routes that hold all logits.

    OMP_NUM_THREADS=2 python benchmarks/linear_logprobs.py [--tokens 8192] [--vocab 151936] [--hidden 128]

Peak memory is what a run takes above its inputs and outputs, as a share of the logits tensor. Inputs and outputs are
hidden states, weight and their gradients. On CPU each side runs in a process of its own. On a GPU also against the
fused linear cross entropy of Liger-Kernel, its form for tensor parallel ranks (on one rank here), QuACK's and Cut Cross
Entropy, which leaves out gradients below rounding; `requirements/peers.txt` installs them. The fastest of those that
run is the best public kernel. Use --tokens 16384 --hidden 4096 --dtype bfloat16 there.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from timing import machine, parse, record, side_by_side, with_warm_allocator
from torch import Tensor

from megarl.ops.logprob import linear_logprobs, linear_token_loss, vocab_parallel_logprobs

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def materialising(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The best route that holds the logits: their memory becomes that of their gradient."""
    logprob, _ = vocab_parallel_logprobs(x @ w.t(), labels, vocab_valid=w.shape[0], inplace_backward=True)
    return torch.autograd.grad(logprob.sum(), (x, w))


def token_loss(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss, *_ = linear_token_loss(x, w, labels, lambda logprob, *_: logprob, vocab_valid=w.shape[0])
    return torch.autograd.grad(loss, (x, w))


def logprobs(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return torch.autograd.grad(linear_logprobs(x, w, labels, vocab_valid=w.shape[0])[0].sum(), (x, w))


def liger(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return torch.autograd.grad(liger_fused_linear_cross_entropy(x, w, labels, reduction="sum"), (x, w))


def liger_parallel(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction as Function

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    result = Function.apply(x, w, labels, dist.group.WORLD)
    nll = result[0] if isinstance(result, tuple) else result
    return torch.autograd.grad(nll.sum(), (x, w))


def quack(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return torch.autograd.grad(chunked_linear_cross_entropy(x, w, labels, reduction="sum"), (x, w))


def cut_cross_entropy(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from cut_cross_entropy import linear_cross_entropy

    return torch.autograd.grad(linear_cross_entropy(x, w, labels, reduction="sum"), (x, w))


PEERS: dict[str, tuple[str, Step]] = {  # the package that each needs
    "liger": ("liger_kernel", liger),
    "liger_parallel": ("liger_kernel", liger_parallel),
    "quack": ("quack", quack),
    "cut_cross_entropy": ("cut_cross_entropy", cut_cross_entropy),
}
STEPS: dict[str, Step] = {"materialising": materialising, "token_loss": token_loss, "logprobs": logprobs}


def inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    x = torch.randn(args.tokens, args.hidden, **options).requires_grad_()
    w = (torch.randn(args.vocab, args.hidden, **options) * args.hidden**-0.5).requires_grad_()
    return x, w, torch.randint(0, args.vocab, (args.tokens,), device=args.device)


def peak_bytes(step: Step, args: argparse.Namespace) -> int:
    """Memory taken above the inputs and outputs by one run."""
    x, w, labels = inputs(args)
    outputs = x.nbytes + w.nbytes
    if args.device == "cuda":
        step(x, w, labels)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(x, w, labels)
        return torch.cuda.max_memory_allocated() - before - outputs
    # A small run first: thread pools and library buffers are no part of the answer.
    step(x[:8], w[:64], labels[:8] % 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(x, w, labels)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - outputs


def peak_of_side(name: str, args: argparse.Namespace) -> int:
    if args.device == "cuda":
        return peak_bytes(STEPS[name], args)
    command = [sys.executable, *sys.argv, "--peak-of", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peaks_of_peers(args: argparse.Namespace) -> dict[str, int]:
    """Peaks of the other packages' functions that are installed and run here; they join STEPS. Others are named."""
    peaks = {}
    for name, (package, step) in PEERS.items():
        if not importlib.util.find_spec(package):
            print(f"{name} is left out: {package} is not installed: requirements/peers.txt")
            continue
        try:
            peaks[name] = peak_bytes(step, args)
        except Exception as error:  # another project's code: its faults are no fault of this comparison
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[:1]}")
        else:
            STEPS[name] = step
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-of", choices=STEPS, help="only print the peak bytes of this side")
    args = parse(parser)
    if args.peak_of:
        print(peak_bytes(STEPS[args.peak_of], args))
        return
    shape = f"T={args.tokens} V={args.vocab} H={args.hidden} {args.dtype}"
    print(f"# {machine(args.device)}; {shape}")
    logits_bytes = args.tokens * args.vocab * getattr(torch, args.dtype).itemsize
    peaks = {name: peak_of_side(name, args) for name in STEPS}
    if args.device == "cuda":
        peaks |= peaks_of_peers(args)
    data = inputs(args)
    sides = {name: lambda step=step: step(*data) for name, step in STEPS.items()}
    t = side_by_side(sides, device=args.device, rounds=args.rounds)
    report(args.device, t, peaks, logits_bytes)


def report(device: str, t: dict[str, float], peaks: dict[str, int], logits_bytes: int) -> None:
    """Prints and records each side's seconds `t` and peak bytes, and megarl's time over the fastest of PEERS."""
    for name, seconds in t.items():
        share, slowdown = peaks[name] / logits_bytes, seconds / t["materialising"]
        labels = {"device": device, "route": name}
        record("time over materialising", slowdown, "x", **labels)
        record("peak memory, share of the logits", share, "share", **labels)
        print(f"{name:17s} {seconds:8.3f} s  {slowdown:5.2f}x the time of materialising", end="")
        print(f"  peak {peaks[name] / 2**20:7.0f} MiB, {share:6.1%} of the logits", flush=True)
    public = {name: t[name] for name in PEERS if name in t}
    if public:
        best = min(public, key=public.__getitem__)
        over = t["token_loss"] / public[best]
        record("time over the best public kernel", over, "x", device=device, route="token_loss", best=best)
        print(f"token_loss takes {over:.2f}x the time of {best}, the best of {', '.join(public)}")


if __name__ == "__main__":
    if "--peak-of" not in sys.argv:
        with_warm_allocator()
    main()
