"""Machines and GPUs of all ranks of a sync as they are planned, and the transports that follow."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.knobs import UserError
from megarl.launcher.machines import machines_of
from megarl.parallel import platform
from megarl.reshard.plan.planner import PlanError
from megarl.reshard.sync.places import TransportChoice, choose_relay, choose_transports
from megarl.reshard.transfer.transports import largest_bucket
from megarl.served_checks import servers_on_gpu


def planned_transports(config: Config) -> str:
    """The transport of each server in words, by the machines as planned. The first sync looks at the real ones.

    Raises:
        UserError: the machines rule reshard.transport out.
    """
    transport = config.reshard.transport
    if sends_full(config):
        return f"full tensors, {'as files' if transport == 'disk' else 'broadcast by gloo'}"
    return str(_choice(config))


def planned_names(config: Config) -> tuple[str, ...]:
    """Names of the transports to the servers; of one that sends full tensors, full or disk.

    Raises:
        UserError: the machines rule reshard.transport out.
    """
    if sends_full(config):
        return ("disk" if config.reshard.transport == "disk" else "full",)
    return _choice(config).names


def planned_bucket_bytes(config: Config) -> int:
    """Bytes of a staging buffer, by `planned_names` where the configuration leaves them open. Raises as it does."""
    names = ("gloo",) if sends_full(config) else planned_names(config)
    return config.reshard.bucket_bytes or largest_bucket(names)


def sends_full(config: Config) -> bool:
    """True if servers get full tensors, without a plan."""
    return config.reshard.path == "full" or config.reshard.transport == "disk"


def _choice(config: Config) -> TransportChoice:
    try:
        world = planned_world(config)
        choice = choose_transports(config.reshard.transport, world)
        choose_relay(config.reshard.relay_among(config.server.n_servers), choice, world)
        return choice
    except PlanError as error:
        raise UserError(str(error)) from error


def trainers_on_gpu(config: Config) -> bool:
    """True if the trainer ranks will hold their weights on GPUs."""
    return config.cluster.gpus_per_node > 0 or platform.takes_gpu_options()


def planned_world(config: Config) -> dict[str, Any]:
    """The places of all ranks, as `choose_transports` takes them; a server sees all GPUs of its machine."""
    machines = machines_of(config)

    def place(number: int, on_gpu: bool) -> dict[str, Any]:
        node, per_node = number // machines.gpus_per_node, machines.gpus_per_node
        visible = [f"GPU {i}" for i in range(node * per_node, (node + 1) * per_node)] if on_gpu else []
        return {"node": f"node {node}", "gpu": f"GPU {number}" if on_gpu else "", "visible_gpus": visible}

    first, tp = machines.first_server_gpu, machines.server_tp
    return {
        "sources": [place(rank, trainers_on_gpu(config)) for rank in range(machines.trainers)],
        "servers": [
            [place(first + server * tp + rank, servers_on_gpu(config)) for rank in range(tp)]
            for server in range(machines.servers)
        ],
    }
