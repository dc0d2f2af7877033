"""Tensors of all ranks of a group, in rank order, so that what is computed of them does not depend on their arrival."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers equally many rows of every rank, `[rows, ...]` -> `[ranks * rows, ...]`. A collective, no gradient."""
    gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered
