"""The one-pass policy loss, forward and backward with metrics, against the same loss in torch eager."""

from __future__ import annotations

import argparse

import torch
from timing import machine, parse, record, side_by_side, with_warm_allocator

from megarl.ops import torch_twins
from megarl.ops.loss import PolicyLossSettings, policy_loss

SETTINGS = PolicyLossSettings(clip_high=0.28, kl_estimator="k3", kl_coef=0.01, correction="truncate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    args = parse(parser, each_device=True)
    for device in args.device:
        print(f"# {machine(device)}; {args.tokens} tokens")
        leaf = torch.randn(args.tokens, device=device).requires_grad_()
        old, ref, rollout = (leaf.detach() + 0.1 * torch.randn(args.tokens, device=device) for _ in range(3))
        advantages, mask = torch.randn(args.tokens, device=device), torch.rand(args.tokens, device=device) < 0.8

        def step(op, leaf=leaf, old=old, ref=ref, rollout=rollout, advantages=advantages, mask=mask) -> None:
            out = op(leaf, old, advantages, mask, settings=SETTINGS, ref_logprobs=ref, rollout_logprobs=rollout)
            torch.autograd.grad(out.loss.sum(), leaf)

        sides = {"ours": lambda step=step: step(policy_loss), "eager": lambda step=step: step(torch_twins.policy_loss)}
        t = side_by_side(sides, device=device, rounds=15)
        record("policy loss over eager", t["eager"] / t["ours"], "x", device=device)
        print(f"policy loss {t['ours'] * 1e3:.2f} ms, eager {t['eager'] * 1e3:.2f} ms: {t['eager'] / t['ours']:.1f}x")


if __name__ == "__main__":
    with_warm_allocator()
    main()
