"""Share of the vocabulary that `actor.skipped_gradient` leaves out, by row count, distribution and share. Needs no GPU.

    python benchmarks/skipped_columns.py [--vocab 151936] [--rows 128 1024]

Rows are made, not a model's. Logits fall by `slope` with log(id + 10), as ids of byte-pair tokens fall in frequency,
with normal noise of 2. Eight tokens of a row, of mostly low ids, are above the rest: their share has log-odds of 0 to
20, exponential with mean 4. A label is drawn from each row. Largest errors are of a row's gradient, over its norm.
"""

from __future__ import annotations

import argparse

import torch
from timing import parse, record
from torch import Tensor

from megarl.ops.skipped_columns import LEAST_SKIPPED, needed_columns

SLOPES = (0.0, 1.0, 1.5)
SHARES = (2**-9, 2**-8, 2**-7, 0.02)
NOISE, CANDIDATES, MEAN_ODDS = 2.0, 8, 4.0
PART = 128  # rows made at a time


def gradients(rows: int, vocab: int, slope: float) -> Tensor:
    """Gradient of the labels' log-probs by the logits, `[rows, vocab]`."""
    generator = torch.Generator().manual_seed(0)
    falling, found = -slope * torch.log(torch.arange(vocab) + 10.0), torch.empty(rows, vocab)
    for part in found.split(PART):
        count = len(part)
        logits = NOISE * torch.randn(count, vocab, generator=generator) + falling
        ids = (vocab * torch.rand(count, CANDIDATES, generator=generator) ** 6).long()
        odds = torch.empty(count, 1).exponential_(1 / MEAN_ODDS, generator=generator).clamp(max=20)
        weights = 3 * torch.empty(count, CANDIDATES).exponential_(1.0, generator=generator).log()
        logits.scatter_(1, ids, logits.logsumexp(1, keepdim=True) + odds + weights.log_softmax(1))
        torch.softmax(logits, 1, out=part)
        labels = torch.multinomial(part, 1, generator=generator)
        part.neg_().scatter_add_(1, labels, torch.ones(count, 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 1024])
    args = parse(parser)
    if min(args.vocab, *args.rows) < CANDIDATES:
        parser.error(f"--vocab and --rows must be at least {CANDIDATES}")
    print("| rows | slope | share | columns below it | largest error | operations of the head |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rows in args.rows:
        for slope in SLOPES:
            d = gradients(rows, args.vocab, slope)
            norms = torch.linalg.vector_norm(d, dim=1)
            for share in SHARES:
                needed = needed_columns(d, share, None)
                skipped = 1 - float(needed.float().mean())
                error = max(
                    float((torch.linalg.vector_norm(part[:, ~needed], dim=1) / norm).max())
                    for part, norm in zip(d.split(PART), norms.split(PART), strict=True)
                )
                operations = 1 - 2 / 3 * skipped * (skipped >= LEAST_SKIPPED)
                print(
                    f"| {rows} | {slope} | {share:.4f} | {skipped:.1%} | {error:.1e} | {operations:.0%} |", flush=True
                )
                record("columns left out", skipped, "share", rows=rows, slope=slope, share=share)


if __name__ == "__main__":
    main()
