"""Random shapes, dtypes, strides, bounds and masks: right against float64 oracles, or refused in one line.

A crash of the process, a wrong value, a write outside of the outputs and any other error are failures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import gae_oracle, group_oracle, logprob_grad_oracle, logprob_oracle
from torch import Tensor

from megarl.cpu import layer_ops
from megarl.cpu import torch_twins as cpu_twins
from megarl.cpu.attention import Sequences, packed_attention
from megarl.ops import torch_twins
from megarl.ops.advantage import GROUP_MODES, gae_packed, group_advantage, moments, whiten
from megarl.ops.logprob import linear_logprobs, vocab_parallel_logprobs
from megarl.ops.loss import (
    CORRECTIONS,
    KL_ESTIMATORS,
    OBJECTIVES,
    RATIO_LEVELS,
    PolicyLossSettings,
    policy_loss,
    segment_sum,
)
from tests.fuzzing import fuzzed

ROUNDING = {torch.float32: 1.2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.3e-16}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
WIDE = st.sampled_from([torch.float32, torch.float64])
SEEDS = st.integers(0, 2**31)
# Widths of vectors and blocks, and their neighbours.
COLUMNS = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 255, 256, 257, 1023, 1025, 4097]))
LENGTHS = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 1023, 1025])), max_size=6)
INTS = st.one_of(st.integers(-3, 40), st.sampled_from([2**31 - 1, -(2**31)]))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strided(values: Tensor, extra: int, offset: int) -> Tensor:
    """Copies a matrix into a buffer with `extra` columns a row, from element `offset`: every alignment."""
    rows, columns = values.shape
    space = torch.full((offset + rows * (columns + extra),), 7.0, dtype=values.dtype)
    return space[offset:].view(rows, columns + extra)[:, :columns].copy_(values)


@fuzzed(bounded=150, long=20_000)
def test_rows_of_logits(effort: Any) -> None:
    @effort
    @given(
        rows=st.integers(0, 6), vocab=COLUMNS, pad=st.integers(0, 9), extra=st.integers(0, 20),
        offset=st.integers(0, 9), dtype=DTYPES, narrow=st.booleans(), per_row=st.booleans(), inplace=st.booleans(),
        scale=st.sampled_from([0.1, 3.0, 80.0]), hidden=st.sampled_from([0.0, 0.5]), threads=st.sampled_from([1, 3]),
        seed=SEEDS,
    )  # fmt: skip
    def holds(rows, vocab, pad, extra, offset, dtype, narrow, per_row, inplace, scale, hidden, threads, seed):
        g = generator(seed)
        logits = (torch.randn(rows, vocab + pad, generator=g) * scale).to(dtype)
        labels = torch.randint(-1, vocab, (rows,), generator=g)
        masked = torch.rand(logits.shape, generator=g) < hidden
        masked[torch.arange(rows), labels.clamp(min=0)] = False
        logits[masked] = -torch.inf
        temperature = torch.rand(rows if per_row else 1, generator=g, dtype=torch.float64) + 0.5
        upstream = [torch.randn(rows, generator=g) for _ in range(2)]
        spread = strided(logits, extra, offset)
        before = spread._base.clone()
        leaf = spread.detach().requires_grad_()
        given_labels = torch.stack([labels, labels], 1)[:, 0].to(torch.int32 if narrow else torch.int64)
        torch.set_num_threads(threads)
        logprob, entropy = vocab_parallel_logprobs(
            leaf,
            given_labels,
            vocab_valid=vocab,
            temperature=temperature,
            with_entropy=True,
            inplace_backward=inplace,
        )
        (grad,) = torch.autograd.grad(
            sum((a * b.to(a.dtype)).sum() for a, b in zip((logprob, entropy), upstream, strict=True)), leaf
        )
        torch.set_num_threads(1)
        want, want_entropy, _ = logprob_oracle(logits, labels, vocab, temperature.numpy())
        close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 3e-6}
        np.testing.assert_allclose(logprob.detach(), want, **close)
        np.testing.assert_allclose(entropy.detach(), want_entropy, **close)
        want = logprob_grad_oracle(logits, labels, vocab, *upstream, temperature.numpy())
        error = np.abs(grad.detach().double().numpy() - want)
        top = np.abs(want).max(initial=0)
        bound = ROUNDING[dtype] * 1.02 * np.abs(want) + close["rtol"] * (top + 1) * (1 + scale)
        assert (error <= bound + (0 if dtype == torch.float64 else 6e-8)).all()
        if inplace:
            spread.copy_(logits)
        assert torch.equal(spread._base, before), "written outside of the rows"

    holds()


@fuzzed(bounded=60, long=8_000)
def test_the_head_in_chunks(effort: Any) -> None:
    @effort
    @given(
        tokens=st.integers(0, 20), width=st.integers(1, 33), vocab=st.integers(1, 60), pad=st.integers(0, 9),
        dtype=WIDE, chunk=st.one_of(st.none(), st.integers(1, 30)), rows=st.booleans(), extra=st.integers(0, 5),
        temperature=st.floats(0.3, 3), seed=SEEDS,
    )  # fmt: skip
    def holds(tokens, width, vocab, pad, dtype, chunk, rows, extra, temperature, seed):
        g = generator(seed)
        hidden = strided(torch.randn(tokens, width, generator=g, dtype=dtype), extra, 0).requires_grad_()
        weight = torch.randn(vocab + pad, width, generator=g, dtype=dtype).requires_grad_()
        labels = torch.randint(-1, vocab, (tokens,), generator=g)
        positions = (labels != -1).nonzero()[:, 0].flip(0) if rows else None
        keys = {"vocab_valid": vocab, "temperature": temperature, "with_entropy": True}
        upstream = torch.randn(2, tokens, generator=g, dtype=torch.float64)

        def run(op: Callable[..., Any], *factors: Tensor, **more: Any) -> tuple[Tensor, ...]:
            values = op(*factors, labels, **keys, **more)
            return *values, *torch.autograd.grad((torch.stack(values).double() * upstream).sum(), factors)

        exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
        got = run(linear_logprobs, hidden, weight, chunk_rows=chunk, rows=positions)
        for a, b in zip(got, run(torch_twins.linear_logprobs, *exact), strict=True):
            tolerance = 1e-11 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(
                a.double(), b, rtol=tolerance, atol=tolerance * (1 + float(b.detach().abs().sum()))
            )

    holds()


def packed(lengths: list[int], masked: float, seed: int, count: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Bounds, a mask, and `count` tensors of values that are exact in float32."""
    g, tokens = generator(seed), sum(lengths)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    values = [(torch.randint(-128, 128, (tokens,), generator=g) / 64).to(dtype) for _ in range(count)]
    return cu, torch.rand(tokens, generator=g) >= masked, values


@fuzzed(bounded=100, long=15_000)
def test_advantages(effort: Any) -> None:
    @effort
    @given(
        lengths=LENGTHS, masked=st.sampled_from([0.0, 0.3, 1.0]), gamma=st.floats(0, 1), lam=st.floats(0, 1),
        each=st.booleans(), groups=st.integers(1, 5), mode=st.sampled_from(GROUP_MODES), columns=st.integers(1, 3),
        seed=SEEDS,
    )  # fmt: skip
    def holds(lengths, masked, gamma, lam, each, groups, mode, columns, seed):
        cu, mask, (rewards, values) = packed(lengths, masked, seed, 2, torch.float32)
        g, count = generator(seed), len(lengths)
        bootstrap, lambdas = torch.randn(count, generator=g), torch.full((count,), lam)
        more = {"bootstrap": bootstrap, "lam": lambdas if each else lam}
        got = gae_packed(rewards, values, mask, cu, gamma=gamma, **more)
        decay = lambdas.tolist() if each else torch.full((count,), lam).tolist()
        for a, b in zip(got, gae_oracle(rewards, values, mask, cu, gamma, decay, bootstrap.tolist()), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * (1 + np.abs(b).max(initial=0)))
        torch.testing.assert_close(moments(values, mask), torch_twins.moments(values, mask), rtol=1e-10, atol=1e-8)
        torch.testing.assert_close(whiten(values, mask), torch_twins.whiten(values, mask), rtol=1e-5, atol=1e-5)
        sums = [[float(v[m].double().sum()), float(m.sum())] for v, m in segments(values, mask, cu)]
        want = torch.tensor(sums, dtype=torch.float64).view(count, 2)
        torch.testing.assert_close(segment_sum(values, mask, cu), want)
        scores, ids = torch.randn(count, columns, generator=g), torch.randint(0, groups, (count,), generator=g)
        aggregation = "normalize_then_sum" if each else "sum_then_normalize"
        relative = group_advantage(scores, ids, mode=mode, aggregation=aggregation)
        np.testing.assert_allclose(
            relative, group_oracle(scores.numpy(), ids.tolist(), mode, 1e-6, each), rtol=1e-3, atol=1e-4
        )

    holds()


def segments(values: Tensor, mask: Tensor, cu: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(values[a:b], mask[a:b]) for a, b in itertools.pairwise(cu.tolist())]


@fuzzed(bounded=100, long=15_000)
def test_the_policy_loss(effort: Any) -> None:
    @effort
    @given(
        lengths=LENGTHS, masked=st.sampled_from([0.0, 0.3, 1.0]), objective=st.sampled_from(OBJECTIVES),
        ratio=st.sampled_from(RATIO_LEVELS), kl=st.sampled_from(KL_ESTIMATORS),
        correction=st.sampled_from(CORRECTIONS), dual=st.sampled_from([None, 1.7]), entropy=st.sampled_from([0.0, 0.3]),
        scale=st.sampled_from([0.5, 30.0]), seed=SEEDS,
    )  # fmt: skip
    def holds(lengths, masked, objective, ratio, kl, correction, dual, entropy, scale, seed):
        cu, mask, (logprob, advantage, old, ref, rollout, h) = packed(lengths, masked, seed, 6, torch.float64)
        settings = PolicyLossSettings(
            objective=objective, ratio=ratio, clip_high=0.28, dual_clip=dual, kl_estimator=kl, kl_coef=0.3,
            entropy_coef=entropy, correction=correction, correction_low=0.5, correction_high=1.5,
        )  # fmt: skip
        others = {"ref_logprobs": ref * scale, "rollout_logprobs": rollout * scale, "cu_seqlens": cu}
        upstream = torch.randn(len(logprob), generator=generator(seed), dtype=torch.float64)
        results = []
        for op in (policy_loss, torch_twins.policy_loss):
            leaves = [t.clone().requires_grad_() for t in (logprob, h)]
            out = op(leaves[0], old * scale, advantage, mask, settings=settings, entropy=leaves[1], **others)
            results.append((out.loss, out.sums, *torch.autograd.grad((out.loss * upstream).sum(), leaves)))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        # In float32 the loss alone: it has no jumps but the mask's.
        if correction != "mask":
            single = [t.float() for t in (logprob, old * scale, advantage)]
            narrow = {k: v if k == "cu_seqlens" else v.float() for k, v in others.items()}
            loss = policy_loss(*single, mask, settings=settings, entropy=h.float(), **narrow).loss
            want = results[1][0].detach()
            torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=1e-4)

    holds()


@fuzzed(bounded=80, long=10_000)
def test_layers_on_the_cpu(effort: Any) -> None:
    @effort
    @given(
        tokens=st.integers(0, 40), width=st.integers(1, 70), heads=st.integers(1, 3), threads=st.sampled_from([1, 3]),
        transposed=st.booleans(), seed=SEEDS,
    )  # fmt: skip
    def holds(tokens, width, heads, threads, transposed, seed):
        g = generator(seed)
        x = torch.randn(tokens, 2 * width, generator=g)
        x = x.t().contiguous().t() if transposed else x
        weight, cos_sin = torch.randn(2 * width, generator=g), torch.randn(tokens, 2 * width, generator=g)
        calls: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = [
            (lambda x, w: layer_ops.rms_norm(x, w, 1e-6), rms_norm, (x, weight)),
            (layer_ops.silu_mul, cpu_twins.silu_mul, (x,)),
            (
                lambda x: layer_ops.rotate(x, cos_sin),
                lambda x: cpu_twins.rotate(x, cos_sin.double()),
                (x.repeat(1, heads).view(tokens, heads, 2 * width),),
            ),
        ]
        torch.set_num_threads(threads)
        for op, twin, inputs in calls:
            leaves = [t.detach().requires_grad_() for t in inputs]
            exact = [t.detach().double().requires_grad_() for t in inputs]
            got, want = op(*leaves), twin(*exact)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
            grads = torch.autograd.grad(got.square().sum(), leaves)
            for a, b in zip(grads, torch.autograd.grad(want.square().sum(), exact), strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * (1 + float(b.abs().sum()) / 100))
        torch.set_num_threads(1)

    holds()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


@st.composite
def shared_prompts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Bounds, rows and skipped tokens of groups that share a prompt, with up to two numbers replaced."""
    bounds, rows, skipped, tokens = [0], [], [], 0
    for prompt, completions in draw(
        st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=3)), max_size=3)
    ):
        first = [*range(tokens, tokens + prompt)]
        tokens += prompt if completions else 0
        for member, length in enumerate(completions):
            rows += [*first, *range(tokens, tokens + length)]
            tokens += length
            bounds.append(len(rows))
            skipped.append(prompt if member else 0)
    parts = [part for part in (bounds, rows, skipped) if part]
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        part = draw(st.sampled_from(parts))
        part[draw(st.integers(0, len(part) - 1))] = draw(INTS)
    return bounds, rows, skipped


@fuzzed(bounded=400, long=30_000)
def test_sequences_of_attention_are_right_or_refused(effort: Any) -> None:
    @effort
    @given(shared_prompts())
    def holds(parts):
        bounds, rows, skipped = parts
        tensors = torch.tensor(bounds).int(), torch.tensor(rows).long(), torch.tensor(skipped).long()
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        tokens = len(rows) - sum(skipped)
        fits = bounds[0] == 0 and bounds[-1] == len(rows) and min(lengths, default=0) >= 0
        fits = fits and all(0 <= s <= n for s, n in zip(skipped, lengths, strict=True))
        fits = fits and all(0 <= row < tokens for row in rows)
        if fits:
            queries = [rows[i] for b, s, n in zip(bounds, skipped, lengths, strict=False) for i in range(b + s, b + n)]
            fits = sorted(queries) == [*range(tokens)]
        if not fits:
            with pytest.raises(ValueError, match=r"^[^\n]+$"):
                Sequences(*tensors)
            return
        inputs = [torch.randn(tokens, n, 8, generator=generator(n)) for n in (2, 1, 1)]
        got = packed_attention(*inputs, Sequences(*tensors), 0.3)
        want = cpu_twins.packed_attention(*(t.double() for t in inputs), Sequences(*tensors), 0.3)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)

    holds()


X, W, LABELS = torch.ones(4, 6), torch.ones(8, 6), torch.tensor([0, 1, -1, 5])
V, M, BOUNDS = torch.ones(4), torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 4], dtype=torch.int32)
SEQUENCE = PolicyLossSettings(ratio="sequence", kl_estimator="k3", correction="mask")
# Calls by name, with valid arguments. Each argument is then broken in its own ways.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "rows": (
        lambda x, labels, temperature: vocab_parallel_logprobs(x, labels, vocab_valid=6, temperature=temperature),
        {"x": X, "labels": LABELS, "temperature": V},
    ),
    "head": (
        lambda x, weight, labels, rows, main_grad: linear_logprobs(
            x, weight, labels, vocab_valid=6, rows=rows, main_grad=main_grad
        ),
        {"x": X, "weight": W, "labels": LABELS, "rows": torch.tensor([0, 1, 3]), "main_grad": torch.zeros(8, 6)},
    ),
    "group": (group_advantage, {"rewards": V, "group_ids": torch.zeros(4, dtype=torch.int64)}),
    "gae": (
        lambda r, v, mask, cu, lam, boot: gae_packed(r, v, mask, cu, lam=lam, bootstrap=boot),
        {"r": V, "v": V, "mask": M, "cu": BOUNDS, "lam": V[:2], "boot": V[:2]},
    ),
    "moments": (moments, {"x": V, "mask": M}),
    "whiten": (whiten, {"x": V, "mask": M}),
    "segment": (lambda x, mask, cu: segment_sum(x, mask, cu), {"x": V, "mask": M, "cu": BOUNDS}),
    "loss": (
        lambda new, old, advantage, mask, ref, rollout, entropy, cu: policy_loss(
            new, old, advantage, mask, settings=SEQUENCE, ref_logprobs=ref, rollout_logprobs=rollout,
            entropy=entropy, cu_seqlens=cu,
        ),
        {"new": V, "old": V, "advantage": V, "mask": M, "ref": V, "rollout": V, "entropy": V, "cu": BOUNDS},
    ),
}  # fmt: skip
BREAKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "dtype": lambda t, n: t.to([torch.complex64, torch.int16, torch.uint8, torch.float8_e5m2][n % 4]),
    "shorter": lambda t, n: t[: -1 - n % len(t)],
    "longer": lambda t, n: torch.cat([t, *[t[-1:]] * (1 + n % 3)]),
    "one dimension more": lambda t, n: t.unsqueeze(n % (t.ndim + 1)),
    "no dimension": lambda t, n: t.reshape(-1)[n % t.numel()],
}
# Breaks that may leave an argument as good as it was.
HARMLESS = {
    ("rows", "temperature", "no dimension"),
    ("rows", "temperature", "shorter"),  # one for all
    ("group", "rewards", "one dimension more"),  # one column
    ("gae", "lam", "shorter"),  # one for all
    ("segment", "cu", "longer"),  # sequences without tokens
    ("loss", "cu", "longer"),
}
BROKEN = sorted({(name, argument, how) for name in CALLS for argument in CALLS[name][1] for how in BREAKS} - HARMLESS)


@fuzzed(bounded=300, long=20_000)
def test_one_broken_argument_is_refused_in_one_line(effort: Any) -> None:
    @effort
    @given(st.sampled_from(BROKEN), st.integers(0, 40))
    def holds(broken, number):
        name, argument, how = broken
        call, arguments = CALLS[name]
        changed = {**arguments, argument: BREAKS[how](arguments[argument], number)}
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            call(**changed)

    for call, arguments in CALLS.values():
        call(**arguments)
    holds()


@fuzzed(bounded=400, long=50_000)
def test_bounds_labels_and_temperatures_are_right_or_refused(effort: Any) -> None:
    any_float, hostile = st.floats(allow_nan=True, allow_infinity=True), st.lists(INTS, max_size=6)

    @effort
    @given(
        st.one_of(hostile, hostile.map(lambda inner: [0, *inner, 4])),
        st.lists(INTS, min_size=4, max_size=4),
        st.one_of(st.floats(0.1, 9), any_float),
    )
    def holds(bounds, labels, temperature):
        cu = torch.tensor(bounds, dtype=torch.int32)
        rises = bounds == sorted(bounds) and bounds[:1] == [0] and bounds[-1:] == [4]
        for name in ("gae", "segment", "loss"):
            call, arguments = CALLS[name]
            more = {"lam": V[:1], "boot": None} if name == "gae" else {}
            outcome = refusal(lambda call=call, arguments=arguments, more=more: call(**{**arguments, "cu": cu, **more}))
            assert_one_line(outcome, rises)
        fits = all(-1 <= label < 6 for label in labels)
        outcome = refusal(lambda: vocab_parallel_logprobs(X, torch.tensor(labels), vocab_valid=6))
        assert_one_line(outcome, fits)
        for value in (temperature, torch.full((4,), temperature, dtype=torch.float64)):
            outcome = refusal(lambda value=value: vocab_parallel_logprobs(X, LABELS, vocab_valid=6, temperature=value))
            assert_one_line(outcome, 1e-30 <= temperature <= 1e30)

    holds()


def assert_one_line(outcome: str | None, valid: bool) -> None:
    assert (outcome is None) == valid, outcome
    assert "\n" not in (outcome or "")


def refusal(call: Callable[[], Any]) -> str | None:
    """The text of a ValueError, or None where results came, all of them finite."""
    try:
        results = call()
    except ValueError as error:
        return str(error)
    for tensor in results if isinstance(results, tuple) else (results,):
        assert tensor is None or bool(tensor.isfinite().all())
    return None
