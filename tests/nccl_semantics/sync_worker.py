"""One rank of a weight sync by the nccl transport: a trainer rank with two servers, or the only rank of a server.

`how` says what server 0 does in its second sync: `healthy`, `slow` (longer than the time to connect), `dead`; or it
dies before the first (`dead_early`). Each rank writes its outcome as JSON: what arrived or failed, sync by sync.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from megarl.parallel.megatron_patches import CUDA_ATTRIBUTES
from megarl.reshard.transfer.shard_transfer import Route, ShardReceiver, ShardSender, TransferError
from megarl.reshard.transfer.store import Deadline, join_store
from megarl.reshard.transfer.transports.base import PlainStaging, Staging
from megarl.reshard.transfer.transports.nccl import NcclTransport
from tests import warm
from tests.nccl_semantics import process_group_nccl
from tests.unit.reshard.test_shard_transfer import ALL, HOST, World, make_world

CONNECT_S = 2.0
SLOW_S = 5.0
TRANSFER_S = 120.0  # of transfers that succeed
HOPELESS_S = 8.0  # of a transfer whose peer is dead, where that is not noticed
SYNCS = 3
BUCKET = 4096


def the_world(server: int) -> World:
    return make_world(server, 1, 1, torch.float32, BUCKET)


def change(world: World, sync: int) -> None:
    """Gives the tensors the values of a sync, on both sides alike."""
    generator = torch.Generator().manual_seed(sync)
    for tensor in world.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


def transport(port: int, server: int, rank: int, staging: Staging) -> NcclTransport:
    store = PrefixStore(f"server/{server}", join_store(HOST, port, TRANSFER_S))
    return NcclTransport(store, HOST, rank, 2, CONNECT_S, staging)


def emulate(noticed: bool) -> None:
    """Puts the emulation in place of NCCL, and the CPU in place of CUDA's streams."""
    process_group_nccl.DEAD_PEERS_ARE_NOTICED = noticed
    setattr(dist, "ProcessGroupNCCL", process_group_nccl.ProcessGroupNCCL)  # noqa: B010
    for name in ("current_stream", "stream"):
        setattr(torch.cuda, name, CUDA_ATTRIBUTES[name][0])
    setattr(NcclTransport, "make_staging", PlainStaging)  # noqa: B010


def trainer_rank(port: int, how: str, outcome: list[Any]) -> None:
    """Syncs both servers; a server that fails is dropped, and the others go on."""
    staging = PlainStaging(BUCKET)
    worlds = {server: the_world(server) for server in (0, 1)}
    groups = {server: transport(port, server, 0, staging) for server in worlds}
    senders = {
        server: ShardSender(
            world.plan,
            0,
            world.sources[0],
            {0: Route(f"rank 0 of server {server}", groups[server], 1)},
            staging,
            keep=False,
        )
        for server, world in worlds.items()
    }
    for sync in range(SYNCS):
        for server, world in worlds.items():
            if server not in senders:
                continue
            change(world, sync)
            dies = server == 0 and how.startswith("dead") and sync == (how == "dead")
            limit_s = HOPELESS_S if dies and not process_group_nccl.DEAD_PEERS_ARE_NOTICED else TRANSFER_S
            try:
                senders[server].send(Deadline(limit_s), ALL, {})
                outcome.append([sync, server, "sent"])
            except TransferError as error:
                outcome.append([sync, server, f"{error.peer}: {error}"])
                groups[server].abort()
                del senders[server]


def server_rank(port: int, how: str, outcome: list[Any], server: int) -> None:
    world, staging = the_world(server), PlainStaging(BUCKET)
    group = transport(port, server, 1, staging)
    receiver = ShardReceiver(world.plan, 0, world.destinations[0], {0: Route("trainer rank 0", group, 0)}, staging)
    for sync in range(SYNCS):
        change(world, sync)
        if server == 0 and sync == (how != "dead_early"):
            if how.startswith("dead"):
                os._exit(0)
            if how == "slow":
                time.sleep(SLOW_S)
        receiver.receive(Deadline(TRANSFER_S), {})
        equal = all(f.view.equal(f.box.of(world.tensors[f.box.name])) for f in world.destinations[0])
        outcome.append([sync, server, "arrived" if equal else "differs"])


def run(environment: dict[str, str], folder: str, name: str, port: int, how: str, noticed: bool) -> None:
    """The process of `trainer`, `server 0` or `server 1`."""
    warm.become(environment, f"{folder}/{name}.log")
    emulate(noticed)
    outcome: list[Any] = []
    if name == "trainer":
        trainer_rank(port, how, outcome)
    else:
        server_rank(port, how, outcome, int(name.split()[1]))
    Path(folder, f"{name}.json").write_text(json.dumps(outcome))
