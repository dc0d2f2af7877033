"""Packed generalised advantage estimation over 64k tokens, against a Python loop over time.

The loop is the usual one over a padded batch: one step a token position, vectorised over the sequences.
"""

from __future__ import annotations

import argparse

import torch
from timing import machine, parse, record, side_by_side, with_warm_allocator
from torch import Tensor

from megarl.ops.advantage import gae_packed
from megarl.types import cu_seqlens_of

SEQUENCES, GAMMA, LAMBDA = 16, 0.99, 0.95


def loop_over_time(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Padded [sequences, length]."""
    advantages = torch.empty_like(rewards)
    last = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(last)
        last = rewards[:, t] + GAMMA * following - values[:, t] + GAMMA * LAMBDA * last
        advantages[:, t] = last
    return advantages, advantages + values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    args = parse(parser, each_device=True)
    for device in args.device:
        print(f"# {machine(device)}; {SEQUENCES} sequences of {args.length} tokens")
        rewards, values = (torch.randn(SEQUENCES, args.length, device=device) for _ in range(2))
        cu = cu_seqlens_of(torch.full((SEQUENCES,), args.length)).to(device)
        flat_rewards, flat_values = rewards.flatten(), values.flatten()
        mask = torch.ones_like(flat_rewards, dtype=torch.bool)

        def ours(rewards=flat_rewards, values=flat_values, mask=mask, cu=cu) -> tuple[Tensor, Tensor]:
            return gae_packed(rewards, values, mask, cu, gamma=GAMMA, lam=LAMBDA)

        def loop(rewards=rewards, values=values) -> tuple[Tensor, Tensor]:
            return loop_over_time(rewards, values)

        torch.testing.assert_close(ours()[0].view_as(rewards), loop()[0], rtol=1e-3, atol=1e-3)
        t = side_by_side({"ours": ours, "loop": loop}, device=device, rounds=9)
        record("gae over a loop", t["loop"] / t["ours"], "x", device=device)
        print(f"GAE {t['ours'] * 1e6:.0f} us, loop over time {t['loop'] * 1e3:.1f} ms: {t['loop'] / t['ours']:.0f}x")


if __name__ == "__main__":
    with_warm_allocator()
    main()
