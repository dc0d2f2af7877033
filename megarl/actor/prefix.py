"""A prompt that a group shares is computed once: `actor.shared_prefix`.

The model is given the tokens of a group without the repetitions of their common beginning. Attention looks up each
completion's keys and values in the one copy of the prompt, the hidden states are spread over the whole sequences again
behind the last layer, and everything from there on (log-probs, loss, gradients) is as without it. As attention is
causal, the common beginning's activations are the same in every sequence of the group, so nothing is approximated.
"""

from __future__ import annotations

import torch

from megarl.actor.context_parallel import LocalTokens
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


def common_length(batch: PackedBatch, members: list[int]) -> int:
    """How many tokens the sequences `members` begin with in common."""
    bounds, ids = batch.cu_seqlens.tolist(), batch["input_ids"]
    first = ids[bounds[members[0]] : bounds[members[0] + 1]]
    common = first.numel()
    for member in members[1:]:
        other = ids[bounds[member] : bounds[member + 1]][:common]
        differing = (first[: other.numel()] != other).nonzero()
        common = int(differing[0]) if differing.numel() else other.numel()
    return common


def share(batch: PackedBatch) -> LocalTokens:
    """Which tokens of a packed batch (on the host) the model is given, each group's common beginning once."""
    total, bounds = batch.total_tokens, batch.cu_seqlens.tolist()
    source, owned = torch.arange(total), torch.ones(total, dtype=torch.bool)
    for members in groups_of(batch):
        common, start = common_length(batch, members), bounds[members[0]]
        for member in members[1:]:
            repeated = slice(bounds[member], bounds[member] + common)
            source[repeated] = torch.arange(start, start + common)
            owned[repeated] = False
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
    for members in groups_of(batch):
        common = common_length(batch, members) if shared else 0
        for place, member in enumerate(members):
            added = lengths[member] - common
            if place == 0 or (not paired and sizes[-1] + added > max_tokens):
                found.append([])
                sizes.append(common)
            found[-1].append(member)
            sizes[-1] += added
    return found, sizes
