"""Deltas by hand: which elements count as changed, how they travel, and what is refused on arrival."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.reshard.transfer import delta

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64)


def test_bits_are_compared_and_not_values() -> None:
    """Elements: a NaN as before, another NaN, zero, minus zero, and 1.0 with its last bit set."""
    old = torch.tensor([0x7FC00000, 0x7FC00000, 0, 0, 0x3F800000], dtype=torch.int32)
    new = torch.tensor([0x7FC00000, 0x7FC00001, 0, -(2**31), 0x3F800001], dtype=torch.int32)
    assert delta.changed(new.view(torch.float32), old.view(torch.float32)).tolist() == [1, 3, 4]


def values(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_changed_elements_of_every_dtype_arrive_in_contiguous_and_strided_parts() -> None:
    old = [values(dtype, count, 1) for dtype in DTYPES for count in (12, 1, 5)]
    new = [part.clone() for part in old]
    for i, part in enumerate(new):
        if i % 3 != 1:  # some parts have no change
            part[:: i + 1] = values(part.dtype, len(part[:: i + 1]), 2)
    counts = [delta.changed(a, b).numel() for a, b in zip(new, old, strict=True)]
    assert 0 in counts
    assert max(counts) > 1
    size = delta.encoded_bytes(counts, [part.dtype.itemsize for part in new])
    assert size % 8 == 0
    payload = torch.zeros(size, dtype=torch.uint8)
    delta.encode(new, old, payload)
    contiguous = [part.clone() for part in old]
    strided = [torch.stack([part.view(torch.uint8 if part.element_size() == 1 else part.dtype)] * 2, 1) for part in old]
    columns = [both.view(part.dtype)[:, 1] for both, part in zip(strided, old, strict=True)]
    for targets in (contiguous, columns):
        delta.apply(payload, counts, targets)
        for target, expected in zip(targets, new, strict=True):
            assert delta.changed(target.contiguous(), expected).numel() == 0


def test_the_payload_may_be_the_memory_of_the_parts() -> None:
    old = [torch.zeros(16), torch.zeros(16)]
    memory = torch.zeros(128, dtype=torch.uint8)
    parts = [memory[:64].view(torch.float32), memory[64:].view(torch.float32)]
    parts[0][3] = 1.0
    parts[1][15] = 2.0
    delta.encode(parts, old, memory)
    targets = [torch.zeros(16), torch.zeros(16)]
    delta.apply(memory, [1, 1], targets)
    assert (targets[0].nonzero().flatten().tolist(), targets[1].nonzero().flatten().tolist()) == ([3], [15])
    assert (float(targets[0][3]), float(targets[1][15])) == (1.0, 2.0)


@pytest.mark.parametrize("index", [6, -1, 7, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("strided", [False, True])
def test_an_index_outside_the_part_is_refused_before_anything_is_written(index: int, strided: bool) -> None:
    payload = torch.zeros(16, dtype=torch.uint8)
    payload[:8].view(torch.int32)[0] = index
    payload[8:12].view(torch.float32)[0] = 5.0
    target = torch.zeros(3, 2).t() if strided else torch.zeros(2, 3)
    with pytest.raises(ValueError, match="an index of the delta lies outside a part of 6 elements"):
        delta.apply(payload, [1], [target])
    assert not target.any()
    payload[:8].view(torch.int32)[0] = 5  # the last
    delta.apply(payload, [1], [target])
    assert float(target.reshape(-1)[5]) == 5.0
