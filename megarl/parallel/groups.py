"""Process groups of the actor: Megatron's tp x pp x dp layout over the trainer ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.knobs import UserError
from megarl.parallel import platform
from megarl.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Groups:
    """This rank's place in the layout and the process groups it belongs to."""

    rank: int
    world_size: int
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    collection: ProcessGroupCollection

    @property
    def tp_rank(self) -> int:
        return self.tp.rank()

    @property
    def tp_size(self) -> int:
        return self.tp.size()

    @property
    def pp_rank(self) -> int:
        return self.pp.rank()

    @property
    def pp_size(self) -> int:
        return self.pp.size()

    @property
    def dp_rank(self) -> int:
        return self.dp.rank()

    @property
    def dp_size(self) -> int:
        return self.dp.size()

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def initialize(config: ParallelConfig) -> Groups:
    """Joins the world (a world of one unless torchrun or the launcher set RANK) and makes Megatron's groups."""
    platform.prepare()
    world = config.world_size()
    if not dist.is_initialized():
        _join_world(platform.collective_backend(), timedelta(seconds=config.timeout_s))
    if dist.get_world_size() != world:
        raise UserError(
            f"parallel.tp_size={config.tp_size} x pp_size={config.pp_size} x dp_size={config.dp_size or 1} needs "
            f"{world} ranks, {dist.get_world_size()} were started"
        )
    if not parallel_state.model_parallel_is_initialized():
        with platform.scope():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=config.tp_size,
                pipeline_model_parallel_size=config.pp_size,
                distributed_timeout_minutes=max(1, round(config.timeout_s / 60)),
            )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    return Groups(dist.get_rank(), world, collection.tp, collection.pp, collection.dp, collection)


def _join_world(backend: str, timeout: timedelta) -> None:
    """Joins the ranks that torchrun or megarl's local launcher started; alone, makes a world of one."""
    if "MEGARL_RENDEZVOUS" in os.environ:  # the local launcher: a file, as torch's TCP store listens on every address
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ["MEGARL_RENDEZVOUS"], world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def destroy() -> None:
    """Leaves all groups."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
