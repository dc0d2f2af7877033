"""Divergences from a teacher against full float64 logits: values, gradients, chunks, and vocabularies over ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.launcher.local import run_ranks
from megarl.ops.divergence import FullTeacher, Student, TopKTeacher, linear_divergence, top_k_logprobs
from tests import warm

TOKENS, VOCAB, PAD, COMMON = 23, 61, 7, 57
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def problem(seed: int = 0) -> dict[str, Tensor]:
    """Float64 states and heads of a student (hidden 6) and a teacher (hidden 9), and labels with gaps."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    labels = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    labels[torch.rand(TOKENS, generator=g) < 0.3] = -1
    return {
        "hidden": draw(TOKENS, 6),
        "weight": draw(VOCAB + PAD, 6),
        "labels": labels,
        "teacher_hidden": draw(TOKENS, 9),
        "teacher_weight": draw(VOCAB + PAD, 9),
        "upstream": draw(3, TOKENS),
    }


def generalised(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """The divergence by its definition, of log-probs `[rows, events]`."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    if beta in (0, 1):
        return kl(logp, logq) if beta == 0 else kl(logq, logp)
    m = (beta * logp.exp() + (1 - beta) * logq.exp()).log()
    return beta * kl(logp, m) + (1 - beta) * kl(logq, m)


def oracle(data: dict[str, Tensor], beta: float, k: int | None, common: int = VOCAB, temperature: float = 0.8) -> Any:
    """Log-probs, entropies, divergences and gradients from whole float64 logits, by autograd."""
    hidden, weight = (data[name].clone().requires_grad_() for name in ("hidden", "weight"))
    rows = (data["labels"] != -1).nonzero().squeeze(1)
    z = (hidden @ weight.t())[rows, :VOCAB] / temperature
    y = (data["teacher_hidden"] @ data["teacher_weight"].t())[rows, :common] / temperature
    logq, logp = z.log_softmax(1), y.log_softmax(1)
    if k is None:
        divergence = generalised(logp, z[:, :common].log_softmax(1), beta)
    else:
        top, ids = logp.topk(k, 1)
        of_student = logq.gather(1, ids)
        rests = [torch.log1p(-x.exp().sum(1, keepdim=True)) for x in (top, of_student)]
        divergence = generalised(torch.cat((top, rests[0]), 1), torch.cat((of_student, rests[1]), 1), beta)
    values = [logq.gather(1, data["labels"][rows].unsqueeze(1)).squeeze(1), -(logq.exp() * logq).sum(1), divergence]
    loss = sum((value * data["upstream"][i][rows]).sum() for i, value in enumerate(values))
    return [value.detach() for value in values], torch.autograd.grad(loss, (hidden, weight))


def computed(
    data: dict[str, Tensor], beta: float, k: int | None, common: int = VOCAB, group: Any = None, **more: Any
) -> Any:
    """What `oracle` returns, by the operation; with a group, of this rank's rows of both heads."""
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    share = (VOCAB + PAD) // size
    part = slice(rank * share, (rank + 1) * share)
    hidden, weight = data["hidden"].clone().requires_grad_(), data["weight"][part].clone().requires_grad_()
    rows = (data["labels"] != -1).nonzero().squeeze(1)
    teacher_hidden, teacher_weight = data["teacher_hidden"][rows], data["teacher_weight"][part]
    teacher: FullTeacher | TopKTeacher = FullTeacher(teacher_hidden, teacher_weight, common)
    if k is not None:
        with torch.autocast("cpu", enabled=False):
            logits = teacher_hidden @ teacher_weight.t() / 0.8
        teacher = TopKTeacher(*top_k_logprobs(logits, k, vocab_valid=VOCAB, vocab_start=rank * share, group=group))
    student = Student(data["labels"], rows, VOCAB, rank * share, group, hidden.dtype, None)
    values = linear_divergence(hidden, weight, student, teacher, beta=beta, temperature=0.8, **more)
    loss = sum((value * data["upstream"][i]).sum() for i, value in enumerate(values))
    return [value.detach()[rows] for value in values], torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("k", [None, 1, 5, 30])
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_are_those_of_whole_float64_logits(beta: float, k: int | None) -> None:
    data = problem()
    for got, expected in zip(computed(data, beta, k, chunk_rows=4), oracle(data, beta, k), strict=True):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("k", [None, 5])
def test_the_size_of_a_chunk_changes_nothing(k: int | None) -> None:
    data = problem()
    whole = computed(data, 0.3, k)
    for rows in (1, 3, 1000):
        for got, expected in zip(computed(data, 0.3, k, chunk_rows=rows), whole, strict=True):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_with_fewer_tokens_is_compared_on_the_common_ones(beta: float) -> None:
    data = problem()
    for got, expected in zip(computed(data, beta, None, COMMON), oracle(data, beta, None, COMMON), strict=True):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_the_top_k_of_all_tokens_is_the_full_divergence() -> None:
    data = problem()
    full, top = (computed(data, 0.5, k)[0][2] for k in (None, VOCAB))
    torch.testing.assert_close(top, full, rtol=0, atol=1e-5)  # the rest has LEAST_REST


def test_a_student_equal_to_its_teacher_has_divergence_and_gradient_zero() -> None:
    data = problem()
    data["teacher_hidden"], data["teacher_weight"] = data["hidden"], data["weight"]
    data["upstream"][:2] = 0
    for beta in BETAS:
        values, grads = computed(data, beta, None)
        assert float(values[2].abs().max()) < 1e-14
        assert all(float(grad.abs().max()) < 1e-13 for grad in grads)


@pytest.mark.parametrize("k", [None, 5])
def test_autocast_changes_no_bit(k: int | None) -> None:
    data = {name: value.float() if value.is_floating_point() else value for name, value in problem().items()}
    plain = computed(data, 0.3, k, chunk_rows=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = computed(data, 0.3, k, chunk_rows=4)
    for got, expected in zip(cast, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("k", [None, 5])
def test_float32_is_near_float64(k: int | None) -> None:
    data = problem()
    narrow = {name: value.float() if value.is_floating_point() else value for name, value in data.items()}
    for beta in BETAS:
        for got, expected in zip(computed(narrow, beta, k), oracle(data, beta, k), strict=True):
            for a, b in zip(got, expected, strict=True):
                assert float((a - b).abs().max()) < (2e-5 if k is None else 2e-3) * max(1.0, float(b.abs().max()))


def test_the_weight_gradient_is_added_to_the_main_gradient() -> None:
    data = problem()
    hidden, weight = (data[name].float().requires_grad_() for name in ("hidden", "weight"))
    rows = (data["labels"] != -1).nonzero().squeeze(1)
    teacher = FullTeacher(data["teacher_hidden"][rows].float(), data["teacher_weight"].float(), VOCAB)
    main = torch.ones_like(weight)

    def run(main_grad: Tensor | None) -> Tensor:
        student = Student(data["labels"], rows, VOCAB, 0, None, torch.float32, main_grad)
        return linear_divergence(hidden, weight, student, teacher, beta=1.0)[2].sum()

    (want,) = torch.autograd.grad(run(None), weight)
    run(main).backward()
    assert weight.grad is None
    torch.testing.assert_close(main - 1, want, rtol=1e-4, atol=1e-5)


def test_tokens_that_the_student_lacks_count_to_the_rest() -> None:
    data = problem()
    rows = (data["labels"] != -1).nonzero().squeeze(1)
    ids = torch.tensor([[3, VOCAB + 2, 9]]).expand(len(rows), 3)
    logp = torch.tensor([0.5, 0.2, 0.1]).double().log().expand(len(rows), 3)
    student = Student(data["labels"], rows, VOCAB, 0, None, torch.float64, None)
    got, expected = (
        linear_divergence(data["hidden"], data["weight"], student, TopKTeacher(ids[:, i], logp[:, i]), beta=0.4)[2]
        for i in ([0, 1, 2], [0, 2])
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-8)


def test_wrong_arguments_are_refused() -> None:
    data = problem()
    with pytest.raises(ValueError, match=r"beta is 1\.5, it must lie between 0"):
        computed(data, 1.5, None)
    rows = torch.arange(3)
    student = Student(data["labels"], rows, VOCAB, 0, None, torch.float64, None)
    teacher = FullTeacher(data["teacher_hidden"], data["teacher_weight"], VOCAB)
    with pytest.raises(ValueError, match="the teacher has 23 rows and the student 3"):
        linear_divergence(data["hidden"], data["weight"], student, teacher, beta=1.0)


def check_this_rank() -> None:
    """Compares this rank's part with the oracle; raises if they differ."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    share = (VOCAB + PAD) // group.size()
    part = slice(group.rank() * share, (group.rank() + 1) * share)
    for seed in range(2):
        data = problem(seed)
        for beta in BETAS:
            for k, common in ((None, VOCAB), (None, COMMON), (None, 30), (5, VOCAB), (30, VOCAB)):
                values, (for_hidden, for_weight) = computed(data, beta, k, common, group, chunk_rows=5)
                expected, (hidden, weight) = oracle(data, beta, k, common)
                for a, b in zip((*values, for_hidden, for_weight), (*expected, hidden, weight[part]), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_vocabulary_cut_over_ranks_gives_the_same(ranks: int, tmp_path: Path) -> None:
    with warm.used():
        code = run_ranks("tests.kernels.divergence_worker", [], ranks, tmp_path)
    assert code == 0, "\n".join(p.read_text()[-2000:] for p in tmp_path.iterdir() if p.is_file())


def test_the_terms_stay_finite_for_certain_tokens() -> None:
    data = problem()
    data["teacher_weight"] = data["teacher_weight"] * 200  # one token has nearly all probability
    for beta in BETAS:
        for k in (None, 3):
            values, grads = computed(data, beta, k)
            assert all(math.isfinite(float(x.abs().max())) for x in (*values, *grads))
