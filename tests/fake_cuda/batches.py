"""A small engine's configuration and a batch for every method; needs no device."""

from __future__ import annotations

from typing import Any

import torch

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.types import PackedBatch, cu_seqlens_of

LENGTHS = [9, 14, 7, 12, 11, 6, 16, 12]  # 87 tokens


def config(path: str, **fields: Any) -> EngineConfig:
    """A small engine; `max_tokens_per_mb` sets the number of microbatches."""
    optimizer = OptimizerConfig(lr=1e-3)
    return EngineConfig(path=path, optimizer=optimizer, **{"backend": "torch", "max_tokens_per_mb": 100, **fields})


def batch() -> PackedBatch:
    """Two groups of four completions, with everything that a method may read."""
    generator = torch.Generator().manual_seed(0)
    lengths, total = torch.tensor(LENGTHS), sum(LENGTHS)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    ids = torch.randint(0, 343, (total,), generator=generator)
    ids[position < 3] = position[position < 3]  # a common prompt
    floats = ("rollout_logprobs", "ref_logp", "values")
    result = PackedBatch(
        cu_seqlens_of(lengths),
        {
            "input_ids": ids,
            "loss_mask": position >= 3,
            **{name: -torch.rand(total, generator=generator) for name in floats},
        },
        {
            "rewards": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1]),
            "group_ids": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
            "is_chosen": torch.tensor([True, False] * 4),
            "pair_ids": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
            "kto_label": torch.tensor([True, False] * 4),
            "kto_kl": torch.full((8,), 0.1),
            "kto_desirable_share": torch.full((8,), 0.5),
        },
    )
    result.shared = True  # as the trainer broadcasts it
    return result


def without(data: PackedBatch, *names: str) -> PackedBatch:
    """The batch without some of its tensors."""
    result = PackedBatch(
        data.cu_seqlens,
        {k: v for k, v in data.tokens.items() if k not in names},
        {k: v for k, v in data.sequences.items() if k not in names},
    )
    result.shared = data.shared
    return result
