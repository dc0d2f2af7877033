"""Refusals of transports that the machines and GPUs of a sync's ranks rule out, before a byte moves.

`world` lists the ranks of both sides as `world.publish_fragments` describes them: node, GPU and visible GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.reshard.plan.planner import PlanError
from megarl.reshard.plan.transfer_plan import Messages

Place = dict[str, Any]


def check_places(transport_name: str, world: dict[str, Any]) -> None:
    """Refuses shm and cuda_ipc across machines, and nccl between ranks on one GPU. Called before any group is made.

    Raises:
        PlanError: naming two ranks at fault, and other transports.
    """
    trainers = [(f"trainer rank {rank}", place) for rank, place in enumerate(world["sources"])]
    for index, server in enumerate(world["servers"]):
        group = [*trainers, *((f"rank {rank} of server {index}", place) for rank, place in enumerate(server))]
        if transport_name in ("shm", "cuda_ipc"):
            _check_one_machine(transport_name, group)
        elif transport_name == "nccl":
            _check_own_gpus(group)


def _check_one_machine(transport_name: str, group: list[tuple[str, Place]]) -> None:
    first, place = group[0]
    for name, other in group:
        if other["node"] != place["node"]:
            raise PlanError(
                f"reshard.transport={transport_name} stays on one machine, and {first} is on {place['node']}, {name} "
                f"on {other['node']}; use gloo, or nccl between GPUs",
                "",
            )


def _check_own_gpus(group: list[tuple[str, Place]]) -> None:
    rank_on: dict[str, str] = {}
    for name, place in group:
        if place["gpu"] in rank_on:
            raise PlanError(
                f"reshard.transport=nccl needs a GPU for each rank, and {rank_on[place['gpu']]} and {name} share "
                f"{place['gpu']}; use cuda_ipc or gloo, or give servers GPUs of their own",
                "",
            )
        if place["gpu"]:
            rank_on[place["gpu"]] = name


def check_visible(messages: Messages, world: dict[str, Any]) -> None:
    """Refuses cuda_ipc where a server rank does not see the GPU of a trainer rank that sends to it.

    Raises:
        PlanError: naming both ranks and their GPUs.
    """
    receivers = [
        (f"rank {rank} of server {index}", place)
        for index, server in enumerate(world["servers"])
        for rank, place in enumerate(server)
    ]
    pairs = np.unique(np.stack([messages.source, messages.destination], axis=1), axis=0)
    for source, destination in pairs.tolist():
        gpu, (name, place) = world["sources"][source]["gpu"], receivers[destination]
        if gpu not in place["visible_gpus"]:
            raise PlanError(
                f"reshard.transport=cuda_ipc: trainer rank {source} sends from {gpu or 'a CPU'}, and {name} sees "
                f"{', '.join(place['visible_gpus']) or 'no GPU'}; use nccl or gloo, or add that GPU to the server's "
                "CUDA_VISIBLE_DEVICES",
                "",
            )
