"""Batches of the ranks: the same batch on all ranks, or a separate one on each data parallel rank.

The trainer passes the same batch on every rank, which it has broadcast. A user's loop may instead sample or load a
batch on each data parallel rank, as AReaL's do. Checksums of the sequences tell the two cases apart. Separate batches
are joined in the order of data parallel ranks, so the result of a step does not depend on how its sequences were
spread.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megarl.knobs import UserError
from megarl.parallel.broadcast import broadcast_batch, gather_json
from megarl.parallel.groups import Groups
from megarl.types import PackedBatch


def join(data: Any, groups: Groups) -> tuple[PackedBatch, slice]:
    """Returns the batch of all ranks on the host, and the sequences in it that this rank passed. A collective.

    Args:
        data: a packed batch or a padded mapping: the same on every rank, or the same on the ranks of each data parallel
            rank.

    Raises:
        UserError: on every rank. Ranks of one data parallel rank passed different sequences, or own batches have
            different keys.
    """
    batch = PackedBatch.from_padded(data)
    batch = batch if batch.device.type == "cpu" else batch.to("cpu")
    if groups.world_size == 1 or batch.shared:
        return batch, slice(None)
    ranks = gather_json([groups.dp_rank, _checksum(batch), batch.num_seqs, sorted(batch.keys())])
    if len({checksum for _, checksum, _, _ in ranks}) == 1:
        return batch, slice(None)
    heads: dict[int, int] = {}  # data parallel rank -> first world rank
    for rank, (dp_rank, checksum, _, keys) in enumerate(ranks):
        head = heads.setdefault(dp_rank, rank)
        if checksum != ranks[head][1]:
            raise UserError(
                f"ranks {head} and {rank} passed different sequences, and both are of data parallel rank {dp_rank}: "
                "pass one batch on all ranks, or one for each engine.data_parallel_rank"
            )
        if keys != ranks[0][3]:
            raise UserError(f"rank 0's batch has the keys {ranks[0][3]} and rank {rank}'s {keys}; give them the same")
    sources = [heads[dp_rank] for dp_rank in sorted(heads)]
    parts = [broadcast_batch(batch if groups.rank == source else None, source) for source in sources]
    first = sum(part.num_seqs for part in parts[: groups.dp_rank])
    return PackedBatch.concat(parts), slice(first, first + parts[groups.dp_rank].num_seqs)


def rows_on_all_ranks(rows: Tensor, groups: Groups) -> Tensor:
    """Copies rows of the global batch to the host of every rank. A collective.

    The last stage computed them. Each row is set on one dp rank and zero on the others.
    """
    if groups.dp_size > 1 and groups.is_last_stage:
        dist.all_reduce(rows, group=groups.dp)
    if groups.pp_size > 1:
        dist.broadcast(rows, dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    return rows.cpu()


def _checksum(batch: PackedBatch) -> int:
    """CRC-32 of the sequences' bounds and tokens."""
    bounds, tokens = (batch[key].cpu().contiguous().numpy().data for key in ("cu_seqlens", "input_ids"))
    return zlib.crc32(tokens, zlib.crc32(bounds))
