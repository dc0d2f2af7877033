"""What all ranks of a sync must agree on: who holds what, where it runs, and the plan that follows from it.

Every rank publishes the boxes that it holds, under their hash, so that replicas publish once. Rank 0 writes who is
who; each rank makes the plan by itself, and the hashes of all plans are compared before a byte moves.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.distributed import Store

from megarl.reshard.plan.holdings import Box, Fragment, Holdings, Topology
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.transfer_plan import TransferPlan
from megarl.reshard.transfer.store import Deadline, read_bulk, write_bulk


def describe(fragments: Sequence[Fragment]) -> list[tuple[str, tuple[int, ...], tuple[int, ...], str]]:
    """What a rank holds, as JSON: (tensor, start, stop, dtype) of each fragment, in order."""
    return [(f.box.name, f.box.start, f.box.stop, str(f.view.dtype).removeprefix("torch.")) for f in fragments]


def publish(store: Store, fragments: Sequence[Fragment]) -> dict[str, str]:
    """Writes what a rank holds into the store. Returns where it lies and which node the rank is on."""
    held = describe(fragments)
    key = "holdings/" + hashlib.sha256(json.dumps(held).encode()).hexdigest()
    if not store.check([key]):
        write_bulk(store, key, held)
    return {"holdings": key, "node": socket.gethostname()}


def local_address(host: str, port: int) -> str:
    """The address of this machine on the way to `host`: what a group should listen on. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def boxes_of(held: Sequence[Any]) -> list[tuple[Box, str]]:
    """What `describe` gave, read back."""
    return [(Box(name, tuple(start), tuple(stop)), dtype) for name, start, stop, dtype in held]


def make_plan(store: Store, world: dict[str, Any], deadline: Deadline) -> TransferPlan:
    """The plan of a world: `sources` of the trainer ranks, `servers` of each server's ranks, as `publish` gave them.

    Raises:
        PlanError: the two sides do not fit together.
    """
    published: dict[str, list[tuple[Box, str]]] = {}

    def holdings(ranks: Sequence[dict[str, str]]) -> Holdings:
        for rank in ranks:
            if rank["holdings"] not in published:
                published[rank["holdings"]] = boxes_of(read_bulk(store, rank["holdings"], deadline))
        return Holdings.of([published[rank["holdings"]] for rank in ranks])

    sources, destinations = world["sources"], [rank for server in world["servers"] for rank in server]
    nodes = {node: i for i, node in enumerate(sorted({rank["node"] for rank in sources + destinations}))}
    topology = Topology(
        source_node=np.array([nodes[rank["node"]] for rank in sources], dtype=np.int64),
        node=np.array([nodes[rank["node"]] for rank in destinations], dtype=np.int64),
        server=np.repeat(np.arange(len(world["servers"])), [len(server) for server in world["servers"]]),
    )
    return plan(holdings(sources), holdings(destinations), topology, world["bucket_bytes"])
