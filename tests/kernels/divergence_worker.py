"""Worker of every rank: divergences with the vocabulary cut over the world, against whole logits."""

from __future__ import annotations

from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from tests.kernels.test_divergence import check_this_rank

if __name__ == "__main__":
    world = ParallelConfig().world_size()
    groups.initialize(ParallelConfig(tp_size=world))
    check_this_rank()
    groups.destroy()
