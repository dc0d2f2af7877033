"""The weight sync as it is planned: its transfer plan, and the memory that it takes of trainer and server ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from megarl.actor.sizes.memory import ITEM_BYTES
from megarl.actor.sizes.parameter_counts import rank_parameters
from megarl.actor.sizes.server_memory import server_memory
from megarl.actor.weights.shards import world_table
from megarl.config import Config, server_ep_size
from megarl.families import with_adapters, without_mtp
from megarl.knobs import UserError
from megarl.launcher.machines import machines_of
from megarl.parallel.placement import places
from megarl.preflight.planned_places import planned_bucket_bytes, planned_names, sends_full, trainers_on_gpu
from megarl.preflight.shapes import server_dtype
from megarl.reshard.plan.holdings import Topology
from megarl.reshard.plan.megatron_layout import source_holdings
from megarl.reshard.plan.planner import PlanError, plan
from megarl.reshard.plan.quantised import quantised_sources
from megarl.reshard.plan.relay import ServedShares
from megarl.reshard.plan.sglang_adapters import adapter_holdings
from megarl.reshard.plan.sglang_layout import server_holdings
from megarl.reshard.plan.transfer_plan import TransferPlan
from megarl.reshard.transfer.memory import SyncMemory, sync_memory
from megarl.rollout.servers.served_adapters import ServedAdapters
from megarl.served_checks import servers_on_gpu

_last: deque[tuple[tuple[Config, ServedAdapters | None], PretrainedConfig, TransferPlan]] = deque(maxlen=2)


def planned_sync(config: Config, model: PretrainedConfig, adapters: ServedAdapters | None = None) -> TransferPlan:
    """Plans the sync of all weights, or of `adapters` alone. The tables of a report share one plan.

    Raises:
        UserError: the method has no servers, or trainer and servers do not fit together.
    """
    for key, of, plan_made in _last:
        if of is model and key == (config, adapters):
            return plan_made
    made = _planned(config, model, adapters)
    _last.append(((config, adapters), model, made))
    return made


def _planned(config: Config, model: PretrainedConfig, adapters: ServedAdapters | None) -> TransferPlan:
    if config.method != "rl":
        raise UserError(f"show=reshard: method={config.method} has no servers that weights are sent to")
    server = config.server
    shape: dict[str, Any] = {
        "tp_size": server.tp_size,
        "n_servers": server.n_servers,
        "dtype": server_dtype(config, model),
        "cpu": not config.cluster.gpus_per_node,
    }
    trained = without_mtp(model)
    if adapters is None:
        shape |= {"ep_size": server_ep_size(config), "format": server.format}
        held = server_holdings(model, **shape)
    else:
        trained = with_adapters(trained, adapters.shape)
        held = adapter_holdings(model, adapters.shape, adapters.names, **shape)
    try:
        sources = source_holdings(world_table(trained, config.parallel), config.actor.dtype)
        if adapters is not None:
            sources = sources.of_adapters(adapters.names)
        elif server.format is not None:
            sources = quantised_sources(sources, server.format, config.parallel)
        relay = config.reshard.relay_among(server.n_servers)
        return plan(sources, held, _topology(config), planned_bucket_bytes(config), relay=relay)
    except PlanError as error:
        raise UserError(f"weights cannot be planned from trainer to servers: {error}") from error


def _topology(config: Config) -> Topology:
    """Nodes and servers of all ranks."""
    machines = machines_of(config)
    first, per_node = machines.first_server_gpu, machines.gpus_per_node
    return Topology(
        source_node=np.arange(machines.trainers) // per_node,
        node=np.arange(first, first + machines.servers * machines.server_tp) // per_node,
        server=np.arange(machines.servers).repeat(machines.server_tp),
    )


def sends_on(config: Config) -> bool:
    """True if servers send weights on to others, as the planner lets servers that are alike do."""
    if sends_full(config):
        return False
    topology, servers = _topology(config), config.server.n_servers
    equal = np.ones(len(topology.node), dtype=np.int64)
    relay, sources = config.reshard.relay_among(servers), len(topology.source_node)
    shares = ServedShares.of(relay, equal, sources, servers)
    near = np.isin(topology.node, topology.source_node)
    groups = [(int(count), True) for count in np.unique(topology.node[near], return_counts=True)[1]]
    groups.append((int((~near).sum()), False))
    return any(shares.roots(ranks, is_near) < ranks for ranks, is_near in groups)


def trainer_sync(config: Config, model: PretrainedConfig) -> list[SyncMemory]:
    """Memory for weight syncs of the fullest trainer rank of each pipeline stage."""
    kept = [0] * config.parallel.pp_size
    if config.reshard.delta:
        packed = planned_sync(config, model).bytes_packed.tolist()
        for place, nbytes in zip(places(config.parallel), packed, strict=True):
            kept[place.pp] = max(kept[place.pp], nbytes)
    name = planned_names(config)[0]  # all transports of a sync send from one kind of memory
    nbytes, has_gpu = planned_bucket_bytes(config), trainers_on_gpu(config)
    item = ITEM_BYTES[server_dtype(config, model)]
    held = (rank_parameters(model, config.parallel, rank) for rank in range(config.parallel.pp_size))
    return [
        sync_memory(name, nbytes, has_gpu=has_gpu, kept=copies, hashed=(own.dense + own.experts) * item)
        for copies, own in zip(kept, held, strict=True)
    ]


def server_sync(config: Config, model: PretrainedConfig) -> SyncMemory:
    """Memory for weight syncs of the fullest server rank: of a relay, where there is one."""
    nbytes, has_gpu, forwards = planned_bucket_bytes(config), servers_on_gpu(config), sends_on(config)
    weights = server_memory(model, config.server.tp_size, server_dtype(config, model), 0, config.server.format).weights
    memories = [
        sync_memory(name, nbytes, has_gpu=has_gpu, forwards=forwards, hashed=weights)
        for name in dict.fromkeys(planned_names(config))
    ]
    return max(memories, key=lambda memory: (memory.gpu, memory.host))


def staging_name(config: Config) -> str:
    """A sync's staging in words, by its transports."""
    return f"{' and '.join(dict.fromkeys(planned_names(config)))} staging"
