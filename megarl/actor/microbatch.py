"""How a global batch becomes microbatches: which data parallel rank takes which sequences, and in what order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.actor.attention import PackedSequences, packed_sequences
from megarl.knobs import UserError
from megarl.types import PackedBatch


@dataclass(frozen=True)
class Microbatch:
    """One packed microbatch on this rank's device.

    `batch` is token-aligned. `aligned` is the same with every per-token tensor shifted to the position that predicts
    it: `aligned["logprobs_key"][i]` belongs to token i + 1, and `labels[i]` is token i + 1 or -1 at a sequence's end.
    """

    indices: list[int]  # of its sequences in the global batch
    batch: PackedBatch
    aligned: PackedBatch
    labels: Tensor  # int64 [tokens]
    packed: PackedSequences
    weight: float  # its share of the loss: weights over all microbatches of all ranks sum to 1

    @property
    def trained_labels(self) -> Tensor:
        """`labels`, -1 also where `loss_mask` leaves the next token out."""
        if "loss_mask" not in self.aligned.tokens:
            return self.labels
        return self.labels.masked_fill(~self.aligned["loss_mask"].bool(), -1)


def partition(lengths: list[int], dp_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Sequence indices by `[dp rank][microbatch]`, the same number of microbatches on every rank.

    Longest first onto the least loaded rank, then longest first into the first microbatch with room. A rank with
    fewer microbatches than the others gets empty ones.

    Raises:
        UserError: a sequence is longer than `max_tokens`.
    """
    if lengths and max(lengths) > max_tokens:
        raise UserError(
            f"a sequence of {max(lengths)} tokens does not fit into actor.max_tokens_per_mb={max_tokens}; "
            f"raise it to at least {max(lengths)}, or shorten prompts or completions"
        )
    loads = [0] * dp_size
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(dp_size), key=lambda r: (loads[r], r))
        loads[rank] += lengths[index]
        ranks[rank].append(index)
    filled = [_fill(members, lengths, max_tokens) for members in ranks]
    most = max(len(microbatches) for microbatches in filled)
    return [microbatches + [[] for _ in range(most - len(microbatches))] for microbatches in filled]


def _fill(members: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    microbatches: list[list[int]] = []
    room: list[int] = []
    for index in members:
        place = next((m for m, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            microbatches.append([])
            room.append(max_tokens)
            place = len(room) - 1
        microbatches[place].append(index)
        room[place] -= lengths[index]
    return [sorted(m) for m in microbatches]


def shift_left(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Token-aligned to position-aligned: `out[i] = values[i + 1]` inside a sequence, 0 at its last position."""
    out = torch.zeros_like(values)
    out[:-1] = values[1:]
    out[_last_positions(cu_seqlens)] = 0
    return out


def shift_right(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Position-aligned to token-aligned: `out[i + 1] = values[i]` inside a sequence, 0 at its first token."""
    out = torch.zeros_like(values)
    out[1:] = values[:-1]
    lengths = cu_seqlens.diff()
    out[cu_seqlens[:-1][lengths > 0].long()] = 0
    return out


def _last_positions(cu_seqlens: Tensor) -> Tensor:
    lengths = cu_seqlens.diff()
    return cu_seqlens[1:][lengths > 0].long() - 1


def build(batch: PackedBatch, indices: list[int], weight: float, device: torch.device) -> Microbatch:
    """The microbatch of the sequences `indices`. An empty one takes the first sequence with weight 0, so that every
    rank runs the same collectives."""
    part = batch.select(indices or [0]).to(device)
    aligned = PackedBatch(
        part.cu_seqlens, {k: shift_left(v, part.cu_seqlens) for k, v in part.tokens.items()}, part.sequences
    )
    labels = aligned["input_ids"].clone()
    labels[_last_positions(part.cu_seqlens)] = -1
    return Microbatch(indices, part, aligned, labels, packed_sequences(part.cu_seqlens), weight if indices else 0.0)
