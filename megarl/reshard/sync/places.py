"""Transports by the machines and GPUs of a sync's ranks: the choice of `auto`, and refusals, before a byte moves.

`world` lists the ranks of both sides as `world.publish_fragments` describes them: node, GPU and visible GPUs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.reshard.config import AUTO, OFF, RELAYING
from megarl.reshard.plan.planner import PlanError
from megarl.reshard.plan.transfer_plan import Messages

Place = dict[str, Any]
Group = list[tuple[str, Place]]  # the trainer ranks and one server's ranks, each with its name for messages


@dataclass(frozen=True)
class TransportChoice:
    """The transport of each server's group, and the reason for it. All of them use one kind of staging memory."""

    names: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        counts = {name: self.names.count(name) for name in dict.fromkeys(self.names)}
        servers = " and ".join(f"{name} to {count} server{'s' * (count > 1)}" for name, count in counts.items())
        return f"{servers}: {self.reason}"


def choose_transports(transport_name: str, world: dict[str, Any]) -> TransportChoice:
    """The transports of a sync. `auto` takes the fastest that the places of all ranks allow, server by server.

    GPU memory is mapped (cuda_ipc) where a server is on the machine of all trainer ranks and sees their GPUs. Else NCCL
    connects the GPUs, if no two ranks share one. gloo is for ranks without a GPU, and for shared GPUs of several
    machines. One server that needs gloo takes all of them there: a rank packs a bucket once, in one kind of memory.

    Raises:
        PlanError: the transport is not `auto`, and the machines or GPUs rule it out.
    """
    groups = _groups(world)
    if transport_name != AUTO:
        check_places(transport_name, world)
        return TransportChoice((transport_name,) * len(groups), f"reshard.transport={transport_name}")
    if without := [name for group in groups for name, place in group if not place["gpu"]]:
        return TransportChoice(("gloo",) * len(groups), f"{without[0]} has no GPU")
    names = ["cuda_ipc" if _maps_all(group, len(world["sources"])) else "nccl" for group in groups]
    for name, group in zip(names, groups, strict=True):
        if name == "nccl" and (shared := _shared_gpu(group)):
            reason = f"{shared[0]} and {shared[1]} share {shared[2]}, which nccl refuses, and cuda_ipc does not reach"
            return TransportChoice(("gloo",) * len(groups), f"{reason} all ranks")
    reasons = {"cuda_ipc": "on the trainer's machine, which maps GPU memory", "nccl": "between GPUs of their own"}
    return TransportChoice(tuple(names), "; ".join(f"{name} {reasons[name]}" for name in dict.fromkeys(names)))


def choose_relay(relay: str, choice: TransportChoice, world: dict[str, Any]) -> tuple[str, str]:
    """The relays of a sync, by the knob `relay`, and the reason where auto has none by the places; else "".

    A relay and a server that it sends to are an NCCL communicator, which may not have a GPU twice.

    Raises:
        PlanError: a fixed number of relays, by a transport that does not reach from server to server, or by nccl where
            servers share a GPU.
    """
    if relay not in (AUTO, OFF) and (rest := sorted(set(choice.names) - set(RELAYING))):
        raise PlanError(
            f"reshard.relay={relay}: the weights travel by {', '.join(rest)} ({choice.reason}), which does not reach "
            "from server to server; use reshard.relay=auto or off, or reshard.transport=gloo or nccl",
            "",
        )
    if relay == OFF or (relay != AUTO and int(relay) >= len(world["servers"])):
        return relay, ""
    receivers = zip(_groups(world), choice.names, strict=True)
    first = len(world["sources"])
    shared = _shared_gpu([rank for group, name in receivers if name == "nccl" for rank in group[first:]])
    if shared is None:
        return relay, ""
    both = f"{shared[0]} and {shared[1]} share {shared[2]}, which nccl refuses between servers"
    if relay == AUTO:
        return OFF, f"no relays: {both}"
    raise PlanError(
        f"reshard.relay={relay}: {both}; use reshard.relay=auto or off, or reshard.transport=gloo, or give servers "
        "GPUs of their own",
        "",
    )


def _groups(world: dict[str, Any]) -> list[Group]:
    trainers = [(f"trainer rank {rank}", place) for rank, place in enumerate(world["sources"])]
    return [
        [*trainers, *((f"rank {rank} of server {index}", place) for rank, place in enumerate(server))]
        for index, server in enumerate(world["servers"])
    ]


def _maps_all(group: Group, trainers: int) -> bool:
    """True if the group is on one machine, where the server's ranks see the GPU of every trainer rank."""
    gpus = {place["gpu"] for _, place in group[:trainers]}
    seen = all(gpus <= set(place["visible_gpus"]) for _, place in group[trainers:])
    return seen and len({place["node"] for _, place in group}) == 1


def check_places(transport_name: str, world: dict[str, Any]) -> None:
    """Refuses shm and cuda_ipc across machines, and nccl between ranks on one GPU. Called before any group is made.

    Raises:
        PlanError: naming two ranks at fault, and other transports.
    """
    for group in _groups(world):
        if transport_name in ("shm", "cuda_ipc"):
            _check_one_machine(transport_name, group)
        elif transport_name == "nccl":
            _check_own_gpus(group)


def _check_one_machine(transport_name: str, group: Group) -> None:
    first, place = group[0]
    for name, other in group:
        if other["node"] != place["node"]:
            raise PlanError(
                f"reshard.transport={transport_name} stays on one machine, and {first} is on {place['node']}, {name} "
                f"on {other['node']}; use gloo, or nccl between GPUs",
                "",
            )


def _check_own_gpus(group: Group) -> None:
    if shared := _shared_gpu(group):
        raise PlanError(
            f"reshard.transport=nccl needs a GPU for each rank, and {shared[0]} and {shared[1]} share {shared[2]}; use "
            "cuda_ipc or gloo, or give servers GPUs of their own",
            "",
        )


def _shared_gpu(group: Group) -> tuple[str, str, str] | None:
    """The first two ranks of a group that share a GPU, and the GPU; None if none do."""
    rank_on: dict[str, str] = {}
    for name, place in group:
        if place["gpu"] in rank_on:
            return rank_on[place["gpu"]], name, place["gpu"]
        if place["gpu"]:
            rank_on[place["gpu"]] = name
    return None


def check_visible(messages: Messages, world: dict[str, Any], mapped: Collection[int]) -> None:
    """Refuses cuda_ipc where a server rank does not see the GPU of a trainer rank that sends to it.

    `mapped` are the servers that receive by cuda_ipc.

    Raises:
        PlanError: naming both ranks and their GPUs.
    """
    receivers = [
        (f"rank {rank} of server {index}", place, index in mapped)
        for index, server in enumerate(world["servers"])
        for rank, place in enumerate(server)
    ]
    pairs = np.unique(np.stack([messages.source, messages.destination], axis=1), axis=0)
    for source, destination in pairs.tolist():
        gpu, (name, place, maps) = world["sources"][source]["gpu"], receivers[destination]
        if maps and gpu not in place["visible_gpus"]:
            raise PlanError(
                f"reshard.transport=cuda_ipc: trainer rank {source} sends from {gpu or 'a CPU'}, and {name} sees "
                f"{', '.join(place['visible_gpus']) or 'no GPU'}; use nccl or gloo, or add that GPU to the server's "
                "CUDA_VISIBLE_DEVICES",
                "",
            )
