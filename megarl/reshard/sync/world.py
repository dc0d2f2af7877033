"""The facts that all ranks of a sync must agree on: holdings and places of every rank, and the plan that follows.

Every rank publishes its boxes under their hash, so that replicas publish once. Rank 0 writes the world: the list of all
ranks and of their holdings. Each rank then plans by itself, and the hashes of all plans are compared before a byte
moves.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import Store

from megarl.families.adapters import adapter_named, is_adapter
from megarl.parallel import platform
from megarl.reshard.plan.holdings import Box, Fragment, Holdings, Topology, is_sent
from megarl.reshard.plan.planner import PlanError, plan
from megarl.reshard.plan.transfer_plan import TransferPlan
from megarl.reshard.transfer.store import Deadline, read_bulk, write_bulk


def describe_fragments(fragments: Sequence[Fragment]) -> list[tuple[str, tuple[int, ...], tuple[int, ...], str]]:
    """JSON of a rank's fragments, in order: (tensor, start, stop, dtype)."""
    return [(f.box.name, f.box.start, f.box.stop, str(f.view.dtype).removeprefix("torch.")) for f in fragments]


def publish_fragments(store: Store, fragments: Sequence[Fragment]) -> dict[str, Any]:
    """Writes a rank's boxes into the store.

    Returns their key, the names of adapters among them, and the rank's node, GPU and visible GPUs.
    """
    described = describe_fragments(fragments)
    key = "holdings/" + hashlib.sha256(json.dumps(described).encode()).hexdigest()
    if not store.check([key]):
        write_bulk(store, key, described)
    visible = platform.gpu_uuids()
    gpu = visible[torch.cuda.current_device()] if visible else ""
    adapters = sorted({adapter_named(f.box.name) for f in fragments if is_adapter(f.box.name)})
    place = {"node": socket.gethostname(), "gpu": gpu, "visible_gpus": visible}
    return {"holdings": key, "adapters": adapters, **place}


def adapters_held(published: Sequence[dict[str, Any]]) -> set[str]:
    """Names of the adapters that one side holds, from the returns of `publish_fragments`."""
    return {name for rank in published for name in rank["adapters"]}


def check_adapters(address: str, held: set[str], sent: set[str]) -> None:
    """Raises PlanError unless the server at `address` holds the adapters that the trainer sends, and no others."""
    for names, fault in (
        (sent - held, "lacks adapters that the trainer sends"),
        (held - sent, "holds adapters that the trainer does not send"),
    ):
        if names:
            raise PlanError(
                f"the server at {address} {fault}: {', '.join(sorted(names))}; start it by megarl.serve with the run's "
                "knobs",
                "",
            )


def local_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`, for groups to listen on. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def described_boxes(described: Sequence[Any]) -> list[tuple[Box, str]]:
    """(box, dtype) of each fragment, from the JSON of `describe_fragments`."""
    return [(Box(name, tuple(start), tuple(stop)), dtype) for name, start, stop, dtype in described]


def make_plan(store: Store, world: dict[str, Any], deadline: Deadline) -> TransferPlan:
    """Plans for a world: `sources` lists the trainer ranks, `servers` each server's ranks, as published.

    With `adapters_only` the plan leaves out the base; `relay` says which servers send on, see `planner.plan`.

    Raises:
        PlanError: the two sides do not fit together.
    """
    published: dict[str, list[tuple[Box, str]]] = {}
    adapters_only = bool(world["adapters_only"])

    def holdings(ranks: Sequence[dict[str, str]]) -> Holdings:
        for rank in ranks:
            if rank["holdings"] not in published:
                published[rank["holdings"]] = described_boxes(read_bulk(store, rank["holdings"], deadline))
        described = [published[rank["holdings"]] for rank in ranks]
        return Holdings.of([[row for row in rows if is_sent(row[0].name, adapters_only)] for rows in described])

    sources, destinations = world["sources"], [rank for server in world["servers"] for rank in server]
    nodes = {node: i for i, node in enumerate(sorted({rank["node"] for rank in sources + destinations}))}
    topology = Topology(
        source_node=np.array([nodes[rank["node"]] for rank in sources], dtype=np.int64),
        node=np.array([nodes[rank["node"]] for rank in destinations], dtype=np.int64),
        server=np.repeat(np.arange(len(world["servers"])), [len(server) for server in world["servers"]]),
    )
    return plan(holdings(sources), holdings(destinations), topology, world["bucket_bytes"], relay=world["relay"])
