"""Splits a global batch into microbatches of the data parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.actor.batch.balance import SequenceCost, karmarkar_karp
from megarl.actor.batch.context_parallel import Cut, LocalTokens, local_tokens
from megarl.actor.batch.shared_prefix import Share, pad, units
from megarl.knobs import UserError
from megarl.types import ROUTED_EXPERTS, PackedBatch


@dataclass(frozen=True)
class Labels:
    """Labels of this rank's tokens, and which tokens have one. The host knows their number without asking a GPU."""

    ids: Tensor  # int64 [local tokens], -1 for none
    rows: Tensor  # int64: tokens with a label

    @staticmethod
    def of(ids: Tensor) -> Labels:
        """Finds the tokens with a label, on the host."""
        return Labels(ids, (ids != -1).nonzero().squeeze(1))


@dataclass(frozen=True)
class FutureTokens:
    """Input and labels of one depth of multi-token prediction, of this rank's tokens. None cross a sequence's end.

    Entry i belongs to token i. At depth d its input is token i + d, and its label token i + d + 1.
    """

    ids: Tensor  # int64 [local tokens]; 0 past the sequence's end, which no token with a label sees
    labels: Labels  # tokens that are in `loss_mask`
    targets: int  # labels of this depth in the whole batch, of all ranks


@dataclass(frozen=True)
class Microbatch:
    """One packed microbatch of this rank: built on the host, and copied to the device as a whole (`feed.py`).

    `batch` is token-aligned. In `aligned`, every per-token tensor is shifted to the position that predicts its token:
    entry i belongs to token i + 1. Both hold complete sequences on every rank. The model reads and returns this rank's
    part of them (`local`), which is smaller under context or sequence parallelism.
    """

    indices: list[int]  # of its sequences in the global batch
    batch: PackedBatch
    aligned: PackedBatch
    input_ids: Tensor  # int64 [local tokens]
    last: Tensor  # int64: positions of the sequences' last tokens, among the microbatch's tokens
    labels: Labels  # the next tokens; none at a sequence's end
    trained_labels: Labels  # the next tokens that are in `loss_mask`
    packed: PackedSeqParams  # parameters of the layer backend's attention
    local: LocalTokens | None  # None: all tokens are on this rank, unpadded
    shared: LocalTokens | None  # tokens that the model reads if groups share prompts (see shared_prefix.py)
    weight: float  # share of the loss; weights over all microbatches of all ranks sum to 1
    future: tuple[FutureTokens, ...] = ()  # by depth, if layers of multi-token prediction are trained
    routes: Tensor | None = None  # experts of the tokens in `input_ids`, [local tokens, layers, topk]; -1: none

    def gather(self, values: Tensor, cp: dist.ProcessGroup) -> Tensor:
        """Gathers `[tokens, ...]` of complete sequences from this rank's `[local tokens, ...]`.

        Differentiable. A collective of the cp group.
        """
        return values if self.local is None else self.local.restore(values, cp)


def check_batch(batch: PackedBatch, vocab_size: int) -> None:
    """Refuses a batch that a model with `vocab_size` tokens cannot run.

    Raises:
        UserError: the batch has no tokens, invalid `cu_seqlens`, or a token outside the vocabulary.
    """
    ids, bounds = batch["input_ids"], batch.cu_seqlens
    if not ids.numel():
        raise UserError(f"the batch holds {batch.num_seqs} sequences and no token; skip empty batches")
    if int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
        raise UserError(f"cu_seqlens is {bounds.tolist()[:8]}...; it must rise from 0 to the number of tokens")
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"input_ids holds token {low if low < 0 else high}, outside the model's vocabulary 0 to {vocab_size - 1}; "
            "use the model's own tokenizer"
        )


def partition(
    sizes: list[int], costs: Sequence[float], dp_size: int, max_tokens: int, multiple_of: int = 1
) -> list[list[list[int]]]:
    """Assigns units (sequences, or groups that stay together) to microbatches, as indices `[dp rank][microbatch]`.

    Every rank gets the same number of microbatches, some of which may be empty. Costs are balanced over the ranks, then
    over each rank's microbatches. If balanced microbatches exceed `max_tokens`, they are filled largest first instead.

    Args:
        sizes: tokens of each unit.
        costs: work of each unit, such as FLOPs.
        dp_size: number of data parallel ranks.
        max_tokens: limit of tokens in a microbatch.
        multiple_of: the number of microbatches is a multiple of this; the interleaved pipeline schedule needs pp.

    Raises:
        UserError: a unit is larger than `max_tokens`.
    """
    if sizes and max(sizes) > max_tokens:
        raise UserError(
            f"a sequence of {max(sizes)} tokens does not fit into actor.max_tokens_per_mb={max_tokens}; "
            f"raise it to at least {max(sizes)}, or shorten prompts or completions"
        )
    ranks = karmarkar_karp(costs, dp_size)
    filled = [_fill(members, sizes, max_tokens) for members in ranks]
    count = max(1, *(len(microbatches) for microbatches in filled))
    count = -(-count // multiple_of) * multiple_of
    return [_even(microbatches, sizes, costs, count, max_tokens) for microbatches in filled]


def _fill(members: list[int], sizes: list[int], max_tokens: int) -> list[list[int]]:
    """Fills as few microbatches as possible, by first-fit decreasing."""
    microbatches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(members, key=lambda i: (-sizes[i], i)):
        target = next((m for m, free in enumerate(room) if free >= sizes[index]), None)
        if target is None:
            microbatches.append([])
            room.append(max_tokens)
            target = len(room) - 1
        microbatches[target].append(index)
        room[target] -= sizes[index]
    return [sorted(m) for m in microbatches]


def _even(
    filled: list[list[int]], sizes: list[int], costs: Sequence[float], count: int, max_tokens: int
) -> list[list[int]]:
    """Redistributes the units of `filled` over `count` microbatches of nearly equal cost.

    Returns `filled` with empty microbatches appended if a balanced microbatch exceeds `max_tokens`.
    """
    members = sorted(index for microbatch in filled for index in microbatch)
    groups = karmarkar_karp([costs[i] for i in members], count)
    even = [[members[i] for i in group] for group in groups]
    if all(sum(sizes[i] for i in microbatch) <= max_tokens for microbatch in even):
        return even
    return filled + [[] for _ in range(count - len(filled))]


def plan_microbatches(
    batch: PackedBatch, cost: SequenceCost, dp_size: int, max_tokens: int, multiple_of: int = 1, shared: bool = False
) -> list[list[list[int]]]:
    """Assigns sequences to microbatches, as indices `[dp rank][microbatch]`.

    Sequences with the same entry in the batch's `pair_ids` stay together. With `shared`, groups with a common prompt
    do too.
    """
    members, sizes = units(batch, max_tokens, shared)
    lengths = batch.lengths.tolist()
    costs = [
        cost.linear * size + sum(cost.quadratic * lengths[i] ** 2 for i in unit)
        for unit, size in zip(members, sizes, strict=True)
    ]
    by_unit = partition(sizes, costs, dp_size, max_tokens, multiple_of)
    return [[[i for unit in mb for i in members[unit]] for mb in rank] for rank in by_unit]


def _shift_left(values: Tensor, last: Tensor) -> Tensor:
    """Shifts token-aligned values to the predicting position: `out[i] = values[i + 1]`, 0 at `last` positions."""
    return values.roll(-1, 0).index_fill_(0, last, 0)


def shift_right(values: Tensor, last: Tensor) -> Tensor:
    """Shifts values at predicting positions to their token: `out[i + 1] = values[i]`, 0 at first tokens.

    `last` has the positions of the sequences' last tokens, which predict nothing.
    """
    out = torch.zeros_like(values)
    out[1:] = values.index_fill(0, last, 0)[:-1]
    return out


def last_positions(cu_seqlens: Tensor) -> Tensor:
    """Positions of the sequences' last tokens, int64; none of an empty sequence. `cu_seqlens` is on the host."""
    lengths = cu_seqlens.diff()
    return cu_seqlens[1:][lengths > 0].long() - 1


def future_targets(batch: PackedBatch, depth: int) -> int:
    """Counts the labels that `batch` has at a depth of multi-token prediction, as `FutureTokens` has them."""
    return int((_future_ids(batch, depth)[1] != -1).sum())


def _future_ids(batch: PackedBatch, depth: int) -> tuple[Tensor, Tensor]:
    """Tokens `depth` further and labels one further still, of each token of `batch` on the host; see `FutureTokens`."""
    ids = batch["input_ids"]
    ends = batch.cu_seqlens[1:].long().repeat_interleave(batch.lengths.long())
    source = torch.arange(len(ids)) + depth

    def at(index: Tensor, values: Tensor) -> Tensor:
        return values[index.clamp(max=len(values) - 1)]

    trained = source + 1 < ends
    if "loss_mask" in batch.tokens:
        trained &= at(source + 1, batch["loss_mask"].bool())
    return at(source, ids).masked_fill(source >= ends, 0), at(source + 1, ids).masked_fill(~trained, -1)


def _future(batch: PackedBatch, targets: Sequence[int], local: LocalTokens | None) -> tuple[FutureTokens, ...]:
    """Builds this rank's inputs and labels of each depth, 1 first."""
    depths = []
    for depth, count in enumerate(targets, start=1):
        ids, labels = _future_ids(batch, depth)
        if local is not None:
            ids, labels = local.take(ids, 0), local.take(labels, -1)
        depths.append(FutureTokens(ids, Labels.of(labels), count))
    return tuple(depths)


def build_microbatch(
    batch: PackedBatch,
    indices: list[int],
    weight: float,
    device: torch.device,
    cut: Cut,
    share: Share | None,
    pack: Callable[[Tensor, torch.device, Cut, LocalTokens | None], PackedSeqParams],
    targets: Sequence[int] = (),
) -> Microbatch:
    """Builds the microbatch of the sequences `indices` on the host, cut for this rank, for `device` to compute.

    An empty microbatch takes the first sequence with weight 0, because every rank must run the same collectives.
    `share` selects the tokens to read; None reads all. `pack` builds the attention's parameters (see `LayerBackend`).
    `targets` has the labels of the whole batch at each depth of multi-token prediction; those need all tokens.
    """
    host = batch.select(indices or [0])
    routes = host.tokens.get(ROUTED_EXPERTS)
    local: LocalTokens | None = None
    shared: LocalTokens | None = None
    if share is not None:
        bounds, padded = pad(share(host), host.cu_seqlens, cut.token_multiple)
        packed = pack(bounds, device, cut, padded)
        shared = padded.without_padding(host.total_tokens)
    else:
        bounds = cut.padded_cu_seqlens(host.cu_seqlens)
        if cut.cp_size > 1 or int(bounds[-1]) != host.total_tokens:
            local = local_tokens(host.cu_seqlens, bounds, cut)
        packed = pack(bounds, device, cut, None)
    inputs, last = host["input_ids"], last_positions(host.cu_seqlens)
    future = _future(host, targets if indices else [0] * len(targets), local)
    labels = inputs.roll(-1).index_fill(0, last, -1)
    trained = labels
    if "loss_mask" in host.tokens:
        trained = labels.masked_fill(~host["loss_mask"].bool().roll(-1), -1)
    if shared is not None:
        inputs = shared.take(inputs, 0)
        routes = shared.take(routes, -1) if routes is not None else None
    elif local is not None:
        inputs, labels, trained = local.take(inputs, 0), local.take(labels, -1), local.take(trained, -1)
        routes = local.take(routes, -1) if routes is not None else None
    host.tokens.pop(ROUTED_EXPERTS, None)  # the model reads them, and no loss does
    aligned_tokens = {k: _shift_left(v, last) for k, v in host.tokens.items()}
    return Microbatch(
        indices,
        host,
        PackedBatch(host.cu_seqlens, aligned_tokens, host.sequences, host.bounds),
        inputs,
        last,
        Labels.of(labels),
        Labels.of(trained),
        packed,
        local,
        shared,
        weight if indices else 0.0,
        future,
        routes,
    )
