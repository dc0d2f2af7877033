"""Labels, positions, segments and response rows of packed tokens, with context parallelism or not. No host sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.ops.native import _C, check, where


class TokenIndex(NamedTuple):
    """Where each local token stands. All int64 `[local tokens]` but `row_count`."""

    labels: Tensor  # the token that row i predicts, -1 where there is none or it is not trained on
    positions: Tensor  # index of the token in the unsharded packed batch
    segments: Tensor  # number of its sequence
    rows: Tensor  # the labelled rows in order, then -1
    row_count: Tensor  # [1]: how many rows are labelled


def build_index(
    input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None = None, *, cp_rank: int = 0, cp_size: int = 1
) -> TokenIndex:
    """The index of this rank's tokens of a packed batch.

    Args:
        input_ids: int64 `[total_tokens]`, the whole batch.
        cu_seqlens: int32 `[num_seqs + 1]`. With `cp_size > 1` every length must be a multiple of `2 * cp_size`:
            each sequence is cut into that many chunks and rank r holds chunks r and `2 * cp_size - 1 - r`.
        loss_mask: bool `[total_tokens]`, token-aligned: a row is labelled where its *next* token is set.
            None: every row but the last of each sequence.
        cp_rank, cp_size: this rank's place in the context-parallel group.
    """
    total = input_ids.numel()
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank} and cp_size {cp_size}; expected 0 <= cp_rank < cp_size")
    if total % cp_size or (cp_size > 1 and total % (2 * cp_size)):
        raise ValueError(f"{total} tokens do not divide into 2 * cp_size = {2 * cp_size} chunks; pad each sequence")
    if cp_size > 1 and cu_seqlens.device.type == "cpu" and bool((cu_seqlens % (2 * cp_size)).any()):
        raise ValueError(f"sequence lengths {cu_seqlens.diff().tolist()} must be multiples of {2 * cp_size}; pad them")
    return TokenIndex(*_index_build(input_ids, cu_seqlens, loss_mask, cp_rank, cp_size))


@torch.library.custom_op("megarl::index_build", mutates_args=())
def _index_build(
    input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None, cp_rank: int, cp_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    total, device = input_ids.numel(), input_ids.device
    check("input_ids", input_ids, dtype=torch.int64, shape=(total,), device=device)
    check("cu_seqlens", cu_seqlens, dtype=torch.int32, shape=(max(cu_seqlens.numel(), 1),), device=device)
    if loss_mask is not None:
        check("loss_mask", loss_mask, dtype=torch.bool, shape=(total,), device=device)
    local = total // cp_size
    labels, positions, segments, rows = (input_ids.new_empty(local) for _ in range(4))
    row_count = input_ids.new_empty(1)
    _C.index_build(
        *(where(input_ids), cu_seqlens.numel() - 1, local, cp_rank, cp_size),
        *(input_ids.data_ptr(), cu_seqlens.data_ptr(), loss_mask.data_ptr() if loss_mask is not None else 0),
        *(labels.data_ptr(), positions.data_ptr(), segments.data_ptr(), rows.data_ptr(), row_count.data_ptr()),
    )
    return labels, positions, segments, rows, row_count


@_index_build.register_fake
def _(
    input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None, cp_rank: int, cp_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    local = input_ids.numel() // cp_size
    labels, positions, segments, rows = (input_ids.new_empty(local) for _ in range(4))
    return labels, positions, segments, rows, input_ids.new_empty(1)
