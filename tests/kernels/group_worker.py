"""Worker of test_groups.py: compares two ranks of a gloo group with one rank that has everything."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.ops.advantage import moments, whiten
from megarl.ops.logprob import linear_logprobs, linear_token_loss, vocab_parallel_logprobs
from megarl.ops.skipped_columns import kept_columns

VOCAB, PAD = 101, 7


def run(rank: int, world: int, init_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", rank=rank, world_size=world, timeout=timedelta(seconds=600)
    )
    group = dist.group.WORLD
    try:
        check_split_vocabulary(rank, world, group)
        check_split_head(rank, world, group)
        check_skipped_columns(rank, world, group)
        check_split_batch(rank, world, group)
    finally:
        dist.destroy_process_group()


def check_split_vocabulary(rank: int, world: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(12, VOCAB + PAD), torch.randint(-1, VOCAB, (12,))
    g, h = torch.randn(12), torch.randn(12)
    width = (VOCAB + PAD) // world
    shard = slice(rank * width, (rank + 1) * width)
    local, whole = logits[:, shard].contiguous().requires_grad_(), logits.clone().requires_grad_()
    keys = {"vocab_valid": VOCAB, "with_entropy": True, "temperature": 0.7}
    got = vocab_parallel_logprobs(local, labels, vocab_start=rank * width, group=group, **keys)
    want = vocab_parallel_logprobs(whole, labels, **keys)
    for (logprob, entropy), leaf in ((got, local), (want, whole)):
        (logprob * g + entropy * h).sum().backward()
        assert leaf.grad is not None
    for a, b in zip((*got, local.grad), (*want, whole.grad[:, shard]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    by_rank = [torch.empty_like(got[0]) for _ in range(world)]
    dist.all_gather(by_rank, got[0].detach())
    assert all(torch.equal(t, by_rank[0]) for t in by_rank), "ranks do not agree to the bit"


def check_split_head(rank: int, world: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(30, 8), torch.randn(VOCAB + PAD, 8)
    labels = torch.randint(-1, VOCAB, (30,))
    width = (VOCAB + PAD) // world
    shard = slice(rank * width, (rank + 1) * width)
    keys = {"vocab_valid": VOCAB, "with_entropy": True, "chunk_rows": 7}
    ours = {**keys, "vocab_start": rank * width, "group": group}
    results = []
    for w, k in ((weight[shard].clone(), ours), (weight.clone(), keys)):
        x, w = hidden.clone().requires_grad_(), w.requires_grad_()
        logprob, entropy = linear_logprobs(x, w, labels, **k)
        first = torch.autograd.grad((logprob.exp() + entropy).sum(), (x, w))
        loss, *_ = linear_token_loss(x, w, labels, lambda a, b, _: a.exp() + b, **k)
        second = torch.autograd.grad(loss, (x, w))
        results.append((logprob, entropy, loss, first[0], second[0], first[1], second[1]))
    whole = [*results[1][:5], *(t[shard] for t in results[1][5:])]
    torch.testing.assert_close(list(results[0]), whole, rtol=1e-5, atol=1e-5)


def check_skipped_columns(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The last rank has the vocabulary's tail. Its share of a row's gradient is small, and it leaves columns out."""
    torch.manual_seed(4)
    vocab, rows, share = 400, 30, 0.02
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64) * 0.5 for n in (rows, vocab))
    hidden[:, 0], weight[:, 0] = 1.0, -6 * torch.arange(1, vocab + 1).log()
    labels, width = torch.arange(rows) % 10, vocab // world
    shard = slice(rank * width, (rank + 1) * width)
    found = []
    for skipped, local, more in (
        (0.0, weight, {}),
        (share, weight[shard], {"vocab_start": rank * width, "group": group}),
    ):
        x, w = hidden.clone().requires_grad_(), local.clone().requires_grad_()
        keys = {"vocab_valid": vocab, "with_entropy": True, "chunk_rows": 11, "skipped": skipped, **more}
        loss, *_ = linear_token_loss(x, w, labels, lambda a, b, _: a + 0.1 * b, **keys)
        found.append(torch.autograd.grad(loss, (x, w)))
    probabilities = (hidden @ weight.t()).softmax(1)
    d = torch.nn.functional.one_hot(labels, vocab) - probabilities  # the entropy's part is smaller
    of_rows = torch.linalg.vector_norm(found[1][0] - found[0][0], dim=1)
    allowed = 2 * share * torch.linalg.vector_norm(d, dim=1) * torch.linalg.matrix_norm(weight, 2)
    assert (of_rows <= allowed).all(), (of_rows / allowed).max()
    left_out = (found[1][1] == 0).all(1).double().mean()
    assert left_out == (1 if rank else pytest.approx(0.8, abs=0.2)), left_out
    tail = d[:, width:].contiguous()
    assert kept_columns(tail, share, None) is None, "by its own norm, the tail keeps all"


def check_split_batch(rank: int, world: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(2)
    x, mask = torch.randn(9000) * 2 + 50, torch.rand(9000) < 0.6
    mask[:4500] &= rank >= 0
    local = slice(0, 0) if rank == 1 else slice(0, 9000)  # one rank has no values
    torch.testing.assert_close(moments(x[local], mask[local], group=group), moments(x, mask), rtol=1e-12, atol=1e-12)
    local = slice(rank * 4500, (rank + 1) * 4500)
    torch.testing.assert_close(whiten(x[local], mask[local], group=group), whiten(x, mask)[local], rtol=1e-6, atol=1e-6)
