"""Cuts a packed microbatch over ranks, for context and sequence parallelism.

Under cp, each sequence is padded to a multiple of 2 * cp tokens and cut into 2 * cp chunks. Rank r holds chunks r and
2 * cp - 1 - r (zigzag order), so causal attention costs every rank the same. Under sequence parallelism, each rank's
tokens are padded to a multiple of tp. Padding is at the end of a sequence, where causal attention hides it from real
tokens.

A *row* is a token's index after an all-gather over cp: all ranks' tokens, concatenated in rank order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.gather import gather_rows
from megarl.parallel.groups import Groups
from megarl.types import cu_seqlens_of


@dataclass(frozen=True)
class Cut:
    """This rank's share of every microbatch's tokens."""

    cp_rank: int = 0
    cp_size: int = 1
    token_multiple: int = 1  # divides each rank's number of tokens; a multiple of tp under sequence parallelism
    fixed_tokens: int = 0  # tokens of every microbatch, filled up by sequences of padding; 0: as few as possible

    @staticmethod
    def of(groups: Groups, multiple: int = 1, most_tokens: int = 0) -> Cut:
        """Builds this rank's cut.

        Args:
            multiple: divides the tokens of each rank that a linear layer reads.
            most_tokens: gives every microbatch so many tokens, rounded up; 0 does not. Only without cp.
        """
        token_multiple = multiple * (groups.tp_size if groups.layout.sequence_parallel else 1)
        fixed_tokens = -(-most_tokens // token_multiple) * token_multiple
        return Cut(groups.cp_rank, groups.cp_size, token_multiple, fixed_tokens)

    def padded_cu_seqlens(self, cu_seqlens: Tensor) -> Tensor:
        """Bounds of the padded sequences, int32 `[num_seqs + 1]`. The last sequence also gets the rank's padding.

        With `fixed_tokens`, sequences of padding follow, none longer than the longest: attention costs least so.
        """
        if self.fixed_tokens:
            lengths = cu_seqlens.diff().long()
            missing, longest = self.fixed_tokens - int(lengths.sum()), max(1, int(lengths.max()))
            fill = [longest] * (missing // longest) + [missing % longest] * (missing % longest > 0)
            return cu_seqlens_of(torch.cat([lengths, torch.tensor(fill, dtype=torch.long)]))
        chunks = 2 * self.cp_size if self.cp_size > 1 else 1
        lengths = -(-cu_seqlens.diff().long() // chunks) * chunks
        lengths[-1] += -int(lengths.sum()) % math.lcm(chunks, self.cp_size * self.token_multiple)
        return cu_seqlens_of(lengths)

    def chunk_lengths(self, padded: Tensor) -> Tensor:
        """Tokens per chunk of each sequence, int64 `[num_seqs]`."""
        lengths = padded.diff().long()
        return lengths // (2 * self.cp_size) if self.cp_size > 1 else lengths

    def my_chunks(self) -> list[int]:
        """Indices of a sequence's chunks on this rank, in order."""
        return [self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank] if self.cp_size > 1 else [0]

    def rows(self, padded: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
        """Rows of the tokens at `positions` of `sequences`. All three are int64 of one shape."""
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
    """Tokens of a microbatch that this rank's model reads."""

    source: Tensor  # int64 [local tokens]: index in the microbatch of each local token, -1 for padding
    rows: Tensor  # int64 [tokens]: row of each token of the microbatch

    def without_padding(self, tokens: int) -> LocalTokens:
        """Marks tokens from `tokens` on as padding, and leaves out their rows."""
        return LocalTokens(torch.where(self.source < tokens, self.source, -1), self.rows[:tokens])

    def take(self, values: Tensor, fill: int) -> Tensor:
        """Selects this rank's part `[local tokens, ...]` of per-token `values [tokens, ...]`. Padding gets `fill`."""
        padding = (self.source < 0).view(-1, *[1] * (values.ndim - 1))
        return values[self.source.clamp(min=0)].masked_fill(padding, fill)

    def restore(self, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gathers `[tokens, ...]` of the microbatch from every cp rank's `[local tokens, ...]`. Differentiable.

        Every cp rank computes the same from the result. So backward only takes this rank's slice of the gradient.
        """
        gathered = _GatherSlicingGradient.apply(local, group) if group.size() > 1 else local
        return gathered.index_select(0, self.rows)


def local_tokens(cu_seqlens: Tensor, padded: Tensor, cut: Cut) -> LocalTokens:
    """Selects this rank's tokens of a microbatch. `padded` is `cut.padded_cu_seqlens(cu_seqlens)`; all on the host."""
    lengths = cu_seqlens.diff().long()
    sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
    total = int(cu_seqlens[-1])
    positions = torch.arange(total) - cu_seqlens.long()[sequences]
    rows = cut.rows(padded, sequences, positions)
    token_of = torch.full((int(padded[-1]),), -1, dtype=torch.long)
    token_of[rows] = torch.arange(total)
    return LocalTokens(token_of.chunk(cut.cp_size)[cut.cp_rank], rows)


class _GatherSlicingGradient(torch.autograd.Function):
    """All-gather of rows. In backward every rank has the same full gradient and takes its own slice."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(values, group)

    @staticmethod
    @first_derivative_only("context parallelism", "parallel.cp_size=1")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class _GatherSummingGradients(torch.autograd.Function):
    """All-gather of rows. Backward sums the ranks' different gradients and scatters them to the owners."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(values, group)

    @staticmethod
    @first_derivative_only("context parallelism", "parallel.cp_size=1")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        local_grad = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(local_grad, grad.contiguous(), group=ctx.group)
        return local_grad, None


def gather_keys_values(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gathers keys and values `[local tokens, kv_heads, dim]` of all cp ranks, in one collective. Differentiable."""
    both = _GatherSummingGradients.apply(torch.stack((key, value), dim=1), group)
    return both[:, 0], both[:, 1]
