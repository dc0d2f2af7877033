"""How a packed microbatch is cut over ranks: context parallel in zigzag order, and padded for sequence parallelism.

Under cp each sequence is padded to a multiple of 2 * cp tokens and cut into 2 * cp chunks; rank r holds chunks r and
2 * cp - 1 - r, so that causal attention costs every rank the same. Under sequence parallelism each rank's tokens are
padded to a multiple of tp. Padding stands at the end of a sequence: causal attention never shows it to a real token.

A *row* is a token's place among the tokens of all cp ranks laid end to end in rank order, which is how collectives
bring them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.groups import Groups
from megarl.types import cu_seqlens_of


@dataclass(frozen=True)
class Cut:
    """This rank's share of every microbatch's tokens."""

    cp_rank: int = 0
    cp_size: int = 1
    token_multiple: int = 1  # each rank's number of tokens is a multiple of it: tp under sequence parallelism

    @staticmethod
    def of(groups: Groups) -> Cut:
        multiple = groups.tp_size if groups.layout.sequence_parallel else 1
        return Cut(groups.cp_rank, groups.cp_size, multiple)

    def padded_cu_seqlens(self, cu_seqlens: Tensor) -> Tensor:
        """int32 `[num_seqs + 1]`: the bounds of the sequences with their padding; the last one fills up the rank."""
        chunks = 2 * self.cp_size if self.cp_size > 1 else 1
        lengths = -(-cu_seqlens.diff().long() // chunks) * chunks
        lengths[-1] += -int(lengths.sum()) % math.lcm(chunks, self.cp_size * self.token_multiple)
        return cu_seqlens_of(lengths)

    def chunk_lengths(self, padded: Tensor) -> Tensor:
        """int64 `[num_seqs]`: tokens of each of a sequence's chunks."""
        lengths = padded.diff().long()
        return lengths // (2 * self.cp_size) if self.cp_size > 1 else lengths

    def my_chunks(self) -> list[int]:
        """Which chunks of a sequence this rank holds, in order."""
        return [self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank] if self.cp_size > 1 else [0]

    def rows(self, padded: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
        """int64: the rows of the tokens at `positions` of `sequences` (int64, of one shape)."""
        starts = padded.long()[:-1] // self.cp_size
        if self.cp_size == 1:
            return starts[sequences] + positions
        size = self.chunk_lengths(padded)[sequences].clamp(min=1)
        chunk, inside = positions // size, positions % size
        second = chunk >= self.cp_size
        owner = torch.where(second, 2 * self.cp_size - 1 - chunk, chunk)
        return owner * (int(padded[-1]) // self.cp_size) + starts[sequences] + second * size + inside


@dataclass(frozen=True)
class LocalTokens:
    """Which tokens of a microbatch this rank's model reads."""

    source: Tensor  # int64 [local tokens]: the token of the microbatch that each holds, -1 for padding
    rows: Tensor  # int64 [tokens]: the row of each token of the microbatch

    def to(self, device: torch.device) -> LocalTokens:
        return LocalTokens(self.source.to(device), self.rows.to(device))

    def take(self, values: Tensor, fill: int) -> Tensor:
        """This rank's part `[local tokens]` of per-token `values [tokens]`, `fill` in padding."""
        return torch.where(self.source < 0, fill, values[self.source.clamp(min=0)])

    def restore(self, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """`[tokens, ...]` of the whole microbatch from every cp rank's `[local tokens, ...]`; differentiable.

        What follows is computed alike on every cp rank, so that backward keeps each rank's own part.
        """
        gathered = _GatherKeepingOwn.apply(local, group) if group.size() > 1 else local
        return gathered.index_select(0, self.rows)


def local_tokens(cu_seqlens: Tensor, padded: Tensor, cut: Cut) -> LocalTokens:
    """Where the tokens of a microbatch go, `padded` being `cut.padded_cu_seqlens(cu_seqlens)`; all on the host."""
    lengths = cu_seqlens.diff().long()
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    total = int(cu_seqlens[-1])
    positions = torch.arange(total) - cu_seqlens.long()[sequences]
    rows = cut.rows(padded, sequences, positions)
    token_of = torch.full((int(padded[-1]),), -1, dtype=torch.long)
    token_of[rows] = torch.arange(total)
    return LocalTokens(token_of.chunk(cut.cp_size)[cut.cp_rank], rows)


def _all_gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = values.new_empty(values.shape[0] * group.size(), *values.shape[1:])
    dist.all_gather_into_tensor(out, values.contiguous(), group=group)
    return out


class _GatherKeepingOwn(torch.autograd.Function):
    """All ranks' rows; the gradient that arrives is whole and equal on every rank, its own part is kept."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gathered(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class _GatherSummingGradients(torch.autograd.Function):
    """All ranks' rows; each rank's gradient is of what it made of them, and their sum goes back to the owner."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gathered(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mine = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


def gather_keys_values(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values `[local tokens, kv_heads, dim]` of all cp ranks, as rows; differentiable, one collective."""
    both = _GatherSummingGradients.apply(torch.stack((key, value), dim=1), group)
    return both[:, 0], both[:, 1]
