"""Copies of many tensors: their bits, and how many operations they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.reshard.transfer.copies import copy_all


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_contiguous_parts_of_a_bucket_are_one_operation_and_the_others_one_each() -> None:
    table = torch.arange(96.0).view(8, 12)
    sources = [table[i] for i in range(6)] + [table[:, :3], table[7], table[6].half()]
    dtypes = [torch.float32] * 7 + [torch.bfloat16, torch.half]
    targets = [torch.zeros(source.shape, dtype=dtype) for source, dtype in zip(sources, dtypes, strict=True)]
    with Operations() as operations:
        copy_all(zip(targets, sources, strict=True))
    assert operations.counts == {"_foreach_copy_": 2, "copy_": 2}  # float32, half; the columns, and the cast
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))
