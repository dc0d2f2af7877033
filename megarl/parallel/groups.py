"""Process groups of the actor: Megatron's tp x pp x cp x dp layout over the trainer ranks."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed.distributed_c10d import _world

from megarl.knobs import UserError
from megarl.parallel import megatron_patches, platform, rendezvous, watchdog
from megarl.parallel.config import ParallelConfig

# Globals that Megatron's destroy_model_parallel (parallel_state.py:2506) does not reset.
LEFT_BY_MEGATRON = ("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO")


@dataclass(frozen=True)
class Groups:
    """This rank's place in the layout, and its process groups.

    `dp` has the replicas of this rank's shard of the model and part of the sequence. Experts are laid out over the same
    ranks by `ep` (expert parallel) and `etp` (tensor parallel inside an expert).
    """

    rank: int
    world_size: int
    layout: ParallelConfig  # with all sizes resolved
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
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
    def vpp_size(self) -> int:
        return self.layout.vpp_size

    @property
    def cp_rank(self) -> int:
        return self.cp.rank()

    @property
    def cp_size(self) -> int:
        return self.cp.size()

    @property
    def dp_rank(self) -> int:
        return self.dp.rank()

    @property
    def dp_size(self) -> int:
        return self.dp.size()

    @property
    def ep_size(self) -> int:
        return self.ep.size()

    @property
    def etp_size(self) -> int:
        return self.etp.size()

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the model's last virtual stage, which computes losses."""
        return self.pp_rank == self.pp_size - 1


def initialize(config: ParallelConfig) -> Groups:
    """Joins the world and creates Megatron's process groups. All engines of a process share them.

    The world has one rank unless torchrun or the launcher set RANK.

    Raises:
        UserError: the layout does not fit the world, or this process has another layout already (see `leave_layout`).
    """
    megatron_patches.prepare()
    world = config.world_size()
    layout = dataclasses.replace(config, dp_size=config.sizes()["dp_size"], etp_size=config.expert_tp_size)
    if not dist.is_initialized():
        _join_world(platform.collective_backend(), timedelta(seconds=config.timeout_s + watchdog.GRACE_S))
        if watchdog.WATCH in os.environ:  # the launcher monitors the records
            shared = rendezvous.job_folder() is not None
            watchdog.start(Path(os.environ[watchdog.WATCH]), dist.get_rank(), world, config.timeout_s, shared=shared)
    if dist.get_world_size() != world:
        raise UserError(
            f"parallel.tp_size={layout.tp_size} x pp_size={layout.pp_size} x cp_size={layout.cp_size} x "
            f"dp_size={layout.dp_size} needs {world} ranks, {dist.get_world_size()} were started"
        )
    if not parallel_state.model_parallel_is_initialized():
        with megatron_patches.scope(), megatron_patches.one_group(world):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp_size,
                pipeline_model_parallel_size=layout.pp_size,
                virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
                context_parallel_size=layout.cp_size,
                expert_model_parallel_size=layout.ep_size,
                expert_tensor_parallel_size=layout.etp_size,
                distributed_timeout_minutes=math.ceil((config.timeout_s + watchdog.GRACE_S) / 60),
            )
        if (
            platform.takes_gpu_options()
        ):  # Megatron creates layers in a fork of it (tensor_parallel/layers.py:177); dropout is 0
            model_parallel_cuda_manual_seed(0)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    groups = Groups(
        *(dist.get_rank(), world, layout),
        *(collection.tp, collection.pp, collection.cp, collection.dp),
        *(collection.ep, collection.expt_tp, collection),
    )
    names = ("tp_size", "pp_size", "cp_size", "dp_size", "ep_size", "etp_size")
    existing = {name: getattr(groups, name) for name in names}
    if existing != {name: getattr(layout, name) for name in names}:
        raise UserError(
            f"this process has the layout {existing} already; give all its engines the same parallel.* sizes"
        )
    return groups


def _join_world(backend: str, timeout: timedelta) -> None:
    """Joins the ranks that torchrun or a megarl launcher started. Without either, creates a world of one rank."""
    folder = rendezvous.job_folder()
    if folder is not None and "RANK" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = rendezvous.ranks_store(folder, rank, world, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    elif (
        "MEGARL_RENDEZVOUS" in os.environ
    ):  # local launcher: a file, because torch's TCP store listens on every address
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(os.environ["MEGARL_RENDEZVOUS"], world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def leave_layout() -> None:
    """Closes the layout's groups but stays in the world, so that another layout can be created.

    Every rank must call it. Megatron drops its groups without closing them, and each open group keeps threads and
    sockets. A group ends with its last reference, which engines of earlier layouts hold in cycles: they are collected.
    """
    if not parallel_state.model_parallel_is_initialized():
        return
    _forget_layout()
    dist.barrier()  # no rank closes a group that another still uses
    for group in [group for group in _world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()


def destroy() -> None:
    """Closes all groups and leaves the world. Groups that engines in cycles hold are collected, as in `leave_layout`.

    Left to a later collection, their threads would end in the middle of something else.
    """
    if parallel_state.model_parallel_is_initialized():
        _forget_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def _forget_layout() -> None:
    """Drops Megatron's references to its groups. A group's threads end with its last reference."""
    for name, group in list(vars(parallel_state).items()):
        if group is dist.group.WORLD:  # of a lone rank; Megatron would close it among its gloo groups
            setattr(parallel_state, name, None)
    parallel_state.destroy_model_parallel()
    for name in LEFT_BY_MEGATRON:
        setattr(parallel_state, name, None)
