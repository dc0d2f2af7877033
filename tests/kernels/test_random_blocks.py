"""Random shapes of quantised weights, divergences and digested buffers, against torch, float64 and the library."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from test_divergence import generalised
from test_quantize import bits, by_torch, packed, packed_by_torch, quantised
from torch import Tensor

from megarl.ops.digest import LEAF_BYTES, Parts, digest
from megarl.ops.divergence import FullTeacher, Student, TopKTeacher, linear_divergence
from megarl.ops.quantize import GROUPS
from tests.fuzzing import fuzzed

SEEDS = st.integers(0, 2**31)
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 300]))
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, -3e38)


def weight_of(rows: int, columns: int, extra: int, special: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A part of a wider matrix, of many magnitudes, with `special` values in places drawn at random."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, columns + extra, generator=g)
    wide *= torch.randint(-40, 40, wide.shape, generator=g).float().exp2()
    for n in range(special):
        wide.view(-1)[int(torch.randint(wide.numel(), (), generator=g))] = SPECIAL[n % len(SPECIAL)]
    return wide.to(dtype)[:, :columns]


def same(one: Tensor, other: Tensor) -> bool:
    """True if all bits are equal, but for those of a NaN."""
    lost = one.float().isnan()
    return torch.equal(lost, other.float().isnan()) and torch.equal(
        *(bits(t)[~lost.repeat_interleave(t.element_size(), -1)] for t in (one, other))
    )


@fuzzed(bounded=150, long=20_000)
def test_blocks_of_8_bits(effort: Any) -> None:
    @effort
    @given(
        rows=SIZES, columns=SIZES, height=SIZES, width=SIZES, extra=st.integers(0, 9), special=st.integers(0, 3),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=SEEDS,
    )  # fmt: skip
    def holds(rows, columns, height, width, extra, special, dtype, seed):
        weight, block = weight_of(rows, columns, extra, special, dtype, seed), (height, width)
        for one, other in zip(quantised(weight, block), by_torch(weight, block), strict=True):
            assert same(one, other)

    holds()


@fuzzed(bounded=150, long=20_000)
def test_groups_of_4_bits(effort: Any) -> None:
    @effort
    @given(
        rows=SIZES, groups=st.integers(1, 9), group=st.sampled_from(GROUPS), extra=st.integers(0, 9),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=SEEDS,
    )  # fmt: skip
    def holds(rows, groups, group, extra, dtype, seed):
        weight = weight_of(rows, groups * group, extra, 0, dtype, seed)
        for one, other in zip(packed(weight, group), packed_by_torch(weight, group), strict=True):
            assert torch.equal(bits(one), bits(other))

    holds()


@fuzzed(bounded=100, long=10_000)
def test_divergences(effort: Any) -> None:
    @effort
    @given(
        tokens=st.integers(1, 20), width=st.integers(1, 9), vocab=st.integers(2, 50), pad=st.integers(0, 5),
        k=st.one_of(st.none(), st.integers(1, 49)), beta=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
        chunk=st.integers(1, 30), seed=SEEDS,
    )  # fmt: skip
    def holds(tokens, width, vocab, pad, k, beta, chunk, seed):
        g = torch.Generator().manual_seed(seed)
        hidden, taught = torch.randn(2, tokens, width, generator=g, dtype=torch.float64)
        weight, head = torch.randn(2, vocab + pad, width, generator=g, dtype=torch.float64)
        labels = torch.randint(-1, vocab, (tokens,), generator=g)
        rows = (labels != -1).nonzero().squeeze(1)
        if not len(rows):
            return
        logp = (taught @ head.t())[rows, :vocab].log_softmax(1)
        logq = (hidden @ weight.t())[rows, :vocab].log_softmax(1)
        teacher: FullTeacher | TopKTeacher = FullTeacher(taught[rows], head, vocab)
        if k is not None:
            top, ids = logp.topk(min(k, vocab - 1), 1)
            teacher = TopKTeacher(ids, top)
            pairs = (top, logq.gather(1, ids))
            logp, logq = (torch.cat([x, torch.log1p(-x.exp().sum(1, keepdim=True))], 1) for x in pairs)
            if min(float(logp.min()), float(logq.min())) < -14:  # the floors of the rest are their own tests' subject
                return
        student = Student(labels, rows, vocab, 0, None, torch.float64, None)
        got = linear_divergence(hidden, weight, student, teacher, beta=beta, chunk_rows=chunk)[2][rows]
        torch.testing.assert_close(got, generalised(logp, logq, beta), rtol=1e-6, atol=1e-7)

    holds()


@fuzzed(bounded=60, long=5_000)
def test_digests_of_the_parts_of_a_buffer(effort: Any) -> None:
    size = st.one_of(st.integers(0, 300), st.sampled_from([LEAF_BYTES - 4, LEAF_BYTES, LEAF_BYTES + 4, 3 * LEAF_BYTES]))

    @effort
    @given(st.lists(st.tuples(size, st.integers(0, 40)), max_size=5), SEEDS)
    def holds(sizes, seed):
        g = torch.Generator().manual_seed(seed)
        offsets, tensors, at = [], [], 0
        for nbytes, gap in sizes:
            tensors.append(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=g))
            offsets.append(at + gap)
            at += gap + nbytes
        buffer = torch.zeros(at, dtype=torch.uint8)
        for offset, tensor in zip(offsets, tensors, strict=True):
            buffer[offset : offset + len(tensor)] = tensor
        parts = Parts(offsets, tensors)
        hashed = parts.digests(bytes(parts.leaves(buffer).flatten().tolist()))
        assert hashed == [digest(tensor) for tensor in tensors]
        for tensor, found in zip(tensors, hashed, strict=True):
            padded = bytes(tensor.tolist()).ljust(-(-len(tensor) // LEAF_BYTES) * LEAF_BYTES, b"\0")
            leaves = b"".join(
                xxhash.xxh3_128_digest(padded[i : i + LEAF_BYTES]) for i in range(0, len(padded), LEAF_BYTES)
            )
            assert found == xxhash.xxh3_128_hexdigest(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + leaves)

    holds()
