"""Computes a group's shared prompt once per microbatch (`actor.shared_prefix`).

The model reads a group's tokens with the common prefix only once. Attention of each completion uses the keys and values
of that single prefix. After the last layer, hidden states are copied back to full sequences. Log-probs, loss and
gradients then work as usual. Attention is causal, so the prefix has the same activations in every sequence of the
group, and nothing is approximated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.actor.batch.context_parallel import LocalTokens
from megarl.knobs import UserError
from megarl.types import PackedBatch


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


@dataclass(frozen=True)
class _Prefixes:
    """Common prefixes of groups in a packed batch. All int64."""

    group_length: Tensor  # [groups]: tokens of the group's common prefix
    length: Tensor  # [total_tokens]: `group_length` of the token's group
    position: Tensor  # [total_tokens]: position in the token's sequence
    twin: Tensor  # [total_tokens]: token at `position` of the group's first sequence; arbitrary past that one's end


def _prefixes(batch: PackedBatch, groups: list[list[int]]) -> _Prefixes:
    lengths, starts, ids = batch.lengths, batch.cu_seqlens[:-1].long(), batch["input_ids"]
    group = torch.empty(batch.num_seqs, dtype=torch.long)
    for number, members in enumerate(groups):
        group[members] = number
    first = torch.tensor([members[0] for members in groups], dtype=torch.long)[group]
    position = torch.arange(batch.total_tokens) - starts.repeat_interleave(lengths)
    twin = (starts[first].repeat_interleave(lengths) + position).clamp(max=batch.total_tokens - 1)
    token_group = group.repeat_interleave(lengths)
    # A prefix ends at the first position where a token differs from its twin, or at the end of the shortest sequence.
    group_length = torch.full((len(groups),), batch.total_tokens).scatter_reduce(0, group, lengths, "amin")
    differs = ids != ids[twin]
    group_length = group_length.scatter_reduce(0, token_group[differs], position[differs], "amin")
    return _Prefixes(group_length, group_length[token_group], position, twin)


def share(batch: PackedBatch) -> LocalTokens:
    """Selects the tokens that the model reads of a packed batch (on the host): each group's common prefix once."""
    prefixes, token = _prefixes(batch, groups_of(batch)), torch.arange(batch.total_tokens)
    source = torch.where(prefixes.position < prefixes.length, prefixes.twin, token)
    is_read = source == token
    row = is_read.long().cumsum(0) - 1
    return LocalTokens(is_read.nonzero().squeeze(1), row[source])


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
    groups = groups_of(batch)
    prefix_lengths = _prefixes(batch, groups).group_length.tolist() if shared else [0] * len(groups)
    for members, prefix_length in zip(groups, prefix_lengths, strict=True):
        for i, member in enumerate(members):
            added = lengths[member] - prefix_length
            if i == 0 or (not paired and sizes[-1] + added > max_tokens):
                unit_members.append([])
                sizes.append(prefix_length)
            unit_members[-1].append(member)
            sizes[-1] += added
    return unit_members, sizes
