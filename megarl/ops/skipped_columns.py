"""Columns of the logits' gradient that the LM head's products may leave out, with a bound on the error.

Let `d` be a row of the gradient and `S` the columns left out. `S` has column c if in every row of the chunk

    |d_c| <= share^2 |d|_2^2 / |d|_1     and so     |d_S|_2^2 <= max_S |d| |d_S|_1 <= share^2 |d|_2^2

in each row. With the head's weight W and the hidden states X, the products then differ by at most

    a row of dX:  share |d|_2 |W|_2          dW, Frobenius norm:  share |d|_F |X|_2

where `|W|_2` and `|X|_2` are largest singular values. Rounding the gradient to bfloat16 alone can be 2^-9 of the same
terms. Norms of rows are taken over all ranks that share the vocabulary, so the bound holds for their sum.

Cut Cross Entropy (Wijmans et al., https://arxiv.org/abs/2411.09009) leaves out tiles by the size of single elements.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

LEAST_SKIPPED = 0.5  # share of the columns; with fewer, copies of weights and gradients cost as much as is saved
COLUMNS = 16384  # at a time, which bounds the memory of the search
ROUNDING = 0.98  # factor of the threshold, for float32 sums over a row


def kept_columns(gradient: Tensor, share: float, group: dist.ProcessGroup | None) -> Tensor | None:
    """Finds the columns of a chunk's gradient `[rows, columns]` to compute with, int64, rising; None for all of them.

    On a GPU this waits for the device. A collective of `group`, whose ranks hold different columns of the same rows.
    """
    columns = needed_columns(gradient, share, group).nonzero().squeeze(1)
    return columns if columns.numel() <= (1 - LEAST_SKIPPED) * gradient.shape[1] else None


def needed_columns(gradient: Tensor, share: float, group: dist.ProcessGroup | None) -> Tensor:
    """Marks the columns that are not in `S`, bool `[columns]`. A collective of `group`.

    A row whose squares vanish in float32 asks for every column with a gradient.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norms = torch.stack([torch.linalg.vector_norm(gradient, p, 1, dtype=wide) for p in (1, 2)]).double()
    norms[1].square_()
    if group is not None:
        dist.all_reduce(norms, group=group)
    total, squares = norms
    scale = torch.where(total == 0, 0.0, total / squares).to(wide)[:, None]  # rows without a gradient ask for no column
    parts = [torch.linalg.vector_norm(part * scale, torch.inf, 0) for part in gradient.split(COLUMNS, 1)]
    return ~(torch.cat(parts) <= ROUNDING * share**2)  # True of NaN
