"""Machines and GPUs of all ranks of a sync as they are planned, and the transports that follow."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.knobs import UserError
from megarl.launcher.machines import machines_of
from megarl.parallel import platform
from megarl.reshard.plan.planner import PlanError
from megarl.reshard.sync.places import choose_transports
from megarl.served_checks import servers_on_gpu


def planned_transports(config: Config) -> str:
    """The transport of each server in words, by the machines as planned. The first sync looks at the real ones.

    Raises:
        UserError: the machines rule reshard.transport out.
    """
    transport = config.reshard.transport
    if config.reshard.path == "full" or transport == "disk":
        return f"full tensors, {'as files' if transport == 'disk' else 'broadcast by gloo'}"
    try:
        return str(choose_transports(transport, planned_world(config)))
    except PlanError as error:
        raise UserError(str(error)) from error


def planned_world(config: Config) -> dict[str, Any]:
    """The places of all ranks, as `choose_transports` takes them; a server sees all GPUs of its machine."""
    machines = machines_of(config)

    def place(number: int, on_gpu: bool) -> dict[str, Any]:
        node, per_node = number // machines.gpus_per_node, machines.gpus_per_node
        visible = [f"GPU {i}" for i in range(node * per_node, (node + 1) * per_node)] if on_gpu else []
        return {"node": f"node {node}", "gpu": f"GPU {number}" if on_gpu else "", "visible_gpus": visible}

    trainers_on_gpu = config.cluster.gpus_per_node > 0 or platform.takes_gpu_options()
    first, tp = machines.first_server_gpu, machines.server_tp
    return {
        "sources": [place(rank, trainers_on_gpu) for rank in range(machines.trainers)],
        "servers": [
            [place(first + server * tp + rank, servers_on_gpu(config)) for rank in range(tp)]
            for server in range(machines.servers)
        ],
    }
