"""Computes what the sequences of a group share once per microbatch (`actor.shared_prefix`).

The model reads a common beginning only once: the group's prompt, and the turns before two conversations part. Attention
of the tokens after it uses the keys and values of that single copy. After the last layer, hidden states are copied back
to full sequences. Log-probs, loss and gradients then work as usual. Attention is causal, so a common beginning has the
same activations in every sequence, and nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megarl.actor.batch.context_parallel import LocalTokens
from megarl.knobs import UserError
from megarl.types import ROUTED_EXPERTS, PackedBatch

# Beyond the group's prompt, two sequences share whole pages of tokens, but for the last page. Samples that agree in a
# few tokens by chance stay apart: their branches would be too short to pay.
PAGE = 64


@dataclass(frozen=True)
class Segment:
    """Tokens of a sequence that are read together and have the same ancestors."""

    start: int  # first token in the packed batch
    length: int  # at least 1
    parent: int  # index of the segment before it, or -1 at the beginning of a sequence


@dataclass(frozen=True)
class SharedTokens(LocalTokens):
    """Tokens that the model reads, in the order of `segments`."""

    segments: list[Segment]


Share = Callable[[PackedBatch], LocalTokens]


def groups_of(batch: PackedBatch) -> list[list[int]]:
    """Lists the sequences of each group, by `pair_ids` or `group_ids`. Groups are in order of first appearance.

    Raises:
        UserError: the batch has neither key.
    """
    key = "pair_ids" if "pair_ids" in batch else "group_ids"
    if key not in batch:
        raise UserError(
            "actor.shared_prefix=true needs the batch's group_ids [num_seqs], one id per shared prompt; set it to "
            "false for this batch"
        )
    members: dict[int, list[int]] = {}
    for index, group in enumerate(batch[key].tolist()):
        members.setdefault(group, []).append(index)
    return list(members.values())


def _equal_tokens(sequences: list[np.ndarray]) -> np.ndarray:
    """Counts the tokens in which each pair of sequences agrees from the beginning, int64 `[n, n]`.

    In sorted order, a pair agrees in the least number of tokens of any neighbours between its two.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())
    neighbours = np.zeros(len(order), dtype=np.int64)  # of each and the one before it
    for i, (first, second) in enumerate(pairwise(order), start=1):
        common = min(len(sequences[first]), len(sequences[second]))
        differs = sequences[first][:common] != sequences[second][:common]
        neighbours[i] = differs.argmax() if differs.any() else common
    result = np.zeros((len(order), len(order)), dtype=np.int64)
    for i, index in enumerate(order):
        result[index, index] = len(sequences[index])
        after = order[i + 1 :]
        result[index, after] = result[after, index] = np.minimum.accumulate(neighbours[i + 1 :])
    return result


def _read_alike(batch: PackedBatch, sequences: list[slice]) -> list[np.ndarray]:
    """Numbers the tokens of sequences. Two have one number if the model reads them alike: with equal routes, if any."""
    ids = batch["input_ids"].numpy()
    if ROUTED_EXPERTS not in batch.tokens:
        return [ids[part] for part in sequences]
    routes = batch[ROUTED_EXPERTS].flatten(1).numpy()
    rows = np.concatenate([np.concatenate((ids[part, None], routes[part]), axis=1) for part in sequences])
    rows = np.ascontiguousarray(rows.astype(np.int32)).view(np.dtype((np.void, 4 * rows.shape[1])))[:, 0]
    numbers = np.unique(rows, return_inverse=True)[1]
    return np.split(numbers, np.cumsum([part.stop - part.start for part in sequences])[:-1])


def _shared_lengths(batch: PackedBatch, members: list[int]) -> np.ndarray:
    """Counts the tokens at the beginning that each pair of a group shares, int64 `[members, members]`.

    All share the group's common prefix. A subset of the group shares at least as much, so it reads no more tokens than
    these lengths imply.
    """
    bounds = batch.cu_seqlens.tolist()
    equal = _equal_tokens(_read_alike(batch, [slice(bounds[i], bounds[i + 1]) for i in members]))
    shared = np.maximum(equal.min(), equal // PAGE * PAGE - PAGE)
    np.fill_diagonal(shared, equal.diagonal())
    return shared


def _groups(batch: PackedBatch) -> list[tuple[list[int], np.ndarray]]:
    return [(members, _shared_lengths(batch, members)) for members in groups_of(batch)]


def _branches(shared: np.ndarray, member: int) -> list[tuple[int, int]]:
    """Lists (owner, end) of the prefixes that a member shares: up to token `end`, the model reads `owner`'s tokens.

    Owners are earlier members. Each token belongs to the first member that has it.
    """
    reach = np.maximum.accumulate(np.concatenate(([0], shared[member, :member])))
    return [(int(owner), int(reach[owner + 1])) for owner in np.flatnonzero(np.diff(reach))]


def _readers(batch: PackedBatch, groups: list[tuple[list[int], np.ndarray]]) -> Tensor:
    """For each token, the index of the token that the model reads in its place, int64 `[total_tokens]`."""
    source, starts = torch.arange(batch.total_tokens), batch.cu_seqlens.tolist()
    for members, shared in groups:
        for member, sequence in enumerate(members):
            begin = 0
            for owner, end in _branches(shared, member):
                first = starts[members[owner]]
                source[starts[sequence] + begin : starts[sequence] + end] = torch.arange(first + begin, first + end)
                begin = end
    return source


def share(batch: PackedBatch) -> LocalTokens:
    """Selects the tokens that the model reads of a packed batch (on the host), in their order."""
    source = _readers(batch, _groups(batch))
    is_read = source == torch.arange(batch.total_tokens)
    row = is_read.long().cumsum(0) - 1
    return LocalTokens(is_read.nonzero().squeeze(1), row[source])


def share_in_segments(batch: PackedBatch) -> SharedTokens:
    """Selects the same tokens as `share`, in an order for attention by segments.

    Beginnings of sequences that others continue come first, then the segments that continue another, and last the
    sequences that share nothing. Segments with one parent are adjacent.
    """
    groups = _groups(batch)
    segments = _in_order(_segments(batch, groups))
    source = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
    row = torch.empty(batch.total_tokens, dtype=torch.long)
    row[source] = torch.arange(len(source))
    return SharedTokens(source, row[_readers(batch, groups)], segments)


def _segments(batch: PackedBatch, groups: list[tuple[list[int], np.ndarray]]) -> list[Segment]:
    """Cuts the tokens that are read where another sequence branches off. Parents come before their children."""
    starts, result = batch.cu_seqlens.tolist(), []
    for members, shared in groups:
        ending: dict[tuple[int, int], int] = {}  # member and position -> index of the segment that ends there
        for member, sequence in enumerate(members):
            branches = _branches(shared, member)
            parent, begin = (ending[branches[-1]], branches[-1][1]) if branches else (-1, 0)
            for end in sorted({int(n) for n in shared[member] if n > begin}):
                result.append(Segment(starts[sequence] + begin, end - begin, parent))
                ending[member, end] = parent = len(result) - 1
                begin = end
    return result


def _in_order(segments: list[Segment]) -> list[Segment]:
    """Sorts segments as `share_in_segments` says, with their parents' new indices."""
    children: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        children.setdefault(segment.parent, []).append(index)
    roots = children.get(-1, [])
    parents = [i for i in roots if i in children]
    order = list(parents)
    for parent in parents:  # the loop appends children that have children
        order += children[parent]
        parents += [i for i in children[parent] if i in children]
    order += [i for i in roots if i not in children]
    place = {-1: -1} | {index: new for new, index in enumerate(order)}
    return [Segment(segments[i].start, segments[i].length, place[segments[i].parent]) for i in order]


def pad(shared: LocalTokens, cu_seqlens: Tensor, multiple: int) -> tuple[Tensor, LocalTokens]:
    """Pads the last sequence until the model reads a multiple of `multiple` tokens.

    Returns the padded bounds, int32 `[num_seqs + 1]`, and the tokens to read, with the padding at their end.
    """
    read, total = len(shared.source), int(cu_seqlens[-1])
    count = -read % multiple
    bounds = torch.cat((cu_seqlens[:-1], cu_seqlens[-1:] + count))
    source = torch.cat((shared.source, torch.arange(total, total + count)))
    rows = torch.cat((shared.rows, torch.arange(read, read + count)))
    if not isinstance(shared, SharedTokens):
        return bounds, LocalTokens(source, rows)
    padding = [Segment(total, count, -1)] if count else []
    return bounds, SharedTokens(source, rows, shared.segments + padding)


def units(batch: PackedBatch, max_tokens: int, shared: bool) -> tuple[list[list[int]], list[int]]:
    """Lists the units that a microbatch must not split, and the number of tokens that the model reads of each.

    Units are the pairs of `pair_ids` if the batch has them. Otherwise they are groups with `shared`, or single
    sequences. A group larger than `max_tokens` is split into several units, each with the prompt. A pair never is.
    """
    lengths = batch.lengths.tolist()
    paired = "pair_ids" in batch
    if not (shared or paired):
        return [[i] for i in range(batch.num_seqs)], lengths
    unit_members: list[list[int]] = []
    sizes: list[int] = []
    for members in groups_of(batch):
        common = _shared_lengths(batch, members) if shared else np.zeros((len(members),) * 2, dtype=np.int64)
        first = 0  # member that begins the unit
        for i, member in enumerate(members):
            added = lengths[member] - int(common[i, first:i].max(initial=0))
            if i == 0 or (not paired and sizes[-1] + added > max_tokens):
                unit_members.append([])
                sizes.append(0)
                first, added = i, lengths[member]
            unit_members[-1].append(member)
            sizes[-1] += added
    return unit_members, sizes
