"""Copies many tensors onto many, with few launches on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies the second tensor of each pair onto the first, cast to its dtype.

    Contiguous pairs of one dtype and device go together: a kernel of `torch._foreach_copy_` takes many. With another
    pair among them, torch would copy all of them one by one.
    """
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        same = target.dtype == source.dtype and target.device == source.device
        if same and target.is_contiguous() and source.is_contiguous():
            targets, sources = alike.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)
    for targets, sources in alike.values():
        torch._foreach_copy_(targets, sources)
