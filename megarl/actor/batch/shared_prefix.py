"""A prompt that a group shares is computed once: `actor.shared_prefix`.

The model is given the tokens of a group without the repetitions of their common beginning. Attention looks up each
completion's keys and values in the one copy of the prompt, the hidden states are spread over the whole sequences again
behind the last layer, and everything from there on (log-probs, loss, gradients) is as without it. As attention is
causal, the common beginning's activations are the same in every sequence of the group, so nothing is approximated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.actor.batch.context_parallel import LocalTokens
from megarl.knobs import UserError
from megarl.types import PackedBatch


def groups_of(batch: PackedBatch) -> list[list[int]]:
    """The sequences that share a prompt, by `pair_ids` or `group_ids`, in the order in which groups first appear.

    Raises:
        UserError: the batch says nothing of groups.
    """
    key = "pair_ids" if "pair_ids" in batch else "group_ids"
    if key not in batch:
        raise UserError(
            "actor.shared_prefix=true needs the batch's group_ids [num_seqs], which says who shares a prompt; "
            "set it to false for this batch"
        )
    found: dict[int, list[int]] = {}
    for index, group in enumerate(batch[key].tolist()):
        found.setdefault(group, []).append(index)
    return list(found.values())


@dataclass(frozen=True)
class _Beginnings:
    """How each token of a packed batch stands to its group. All int64."""

    common: Tensor  # [groups]: how many tokens the group's sequences begin with in common
    shared: Tensor  # [total_tokens]: that number, of the token's group
    position: Tensor  # [total_tokens]: its place in its sequence
    twin: Tensor  # [total_tokens]: the token at that place in its group's first sequence; past that one's end, any


def _beginnings(batch: PackedBatch, groups: list[list[int]]) -> _Beginnings:
    lengths, starts, ids = batch.lengths, batch.cu_seqlens[:-1].long(), batch["input_ids"]
    group = torch.empty(batch.num_seqs, dtype=torch.long)
    for number, members in enumerate(groups):
        group[members] = number
    first = torch.tensor([members[0] for members in groups], dtype=torch.long)[group]
    position = torch.arange(batch.total_tokens) - starts.repeat_interleave(lengths)
    twin = (starts[first].repeat_interleave(lengths) + position).clamp(max=batch.total_tokens - 1)
    of_token = group.repeat_interleave(lengths)
    # the first place where a token differs from its twin; none lies behind the end of a sequence
    common = torch.full((len(groups),), batch.total_tokens).scatter_reduce(0, group, lengths, "amin")
    differs = ids != ids[twin]
    common = common.scatter_reduce(0, of_token[differs], position[differs], "amin")
    return _Beginnings(common, common[of_token], position, twin)


def share(batch: PackedBatch) -> LocalTokens:
    """Which tokens of a packed batch (on the host) the model is given, each group's common beginning once."""
    found, own = _beginnings(batch, groups_of(batch)), torch.arange(batch.total_tokens)
    source = torch.where(found.position < found.shared, found.twin, own)
    owned = source == own
    place = owned.long().cumsum(0) - 1
    return LocalTokens(owned.nonzero().squeeze(1), place[source])


def units(batch: PackedBatch, max_tokens: int, shared: bool) -> tuple[list[list[int]], list[int]]:
    """What goes into microbatches whole, with the tokens that the model is given of each: the pairs of `pair_ids`, with
    `shared` else groups, otherwise single sequences. A group that `max_tokens` does not hold is cut into several units,
    each with the prompt; a pair never is."""
    lengths = batch.lengths.tolist()
    paired = "pair_ids" in batch
    if not (shared or paired):
        return [[i] for i in range(batch.num_seqs)], lengths
    found: list[list[int]] = []
    sizes: list[int] = []
    groups = groups_of(batch)
    commons = _beginnings(batch, groups).common.tolist() if shared else [0] * len(groups)
    for members, common in zip(groups, commons, strict=True):
        for place, member in enumerate(members):
            added = lengths[member] - common
            if place == 0 or (not paired and sizes[-1] + added > max_tokens):
                found.append([])
                sizes.append(common)
            found[-1].append(member)
            sizes[-1] += added
    return found, sizes
